"""Training frameworks: what they need to work with updates inside backward. None of them is imported or required."""

"""How weights and optimizer states are stored: rounding, 8-bit codes, and bits beside a bf16 weight, in PyTorch.

`forge_dsl.runtime.device_formats` is the same in Triton, bit for bit.
"""

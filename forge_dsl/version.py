"""The version: of the package, of the command, and of the header that generated files carry."""

__version__ = "0.1.0"

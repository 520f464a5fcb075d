"""The version of the package, which everything may ask for."""

__version__ = "0.1.0"

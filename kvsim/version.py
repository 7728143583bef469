"""The version of kvsim, recorded in every result."""

__version__ = "0.3.0"

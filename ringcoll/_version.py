"""The version, which the package's metadata, files and messages between ranks name."""

__version__ = "0.1.0"

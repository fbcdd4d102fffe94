"""The version, in one place: the build and `cpkv --version` both read it here."""

__version__ = "0.1.0"

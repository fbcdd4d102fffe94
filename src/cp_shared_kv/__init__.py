"""One logical KV pool for a prefill context-parallel group."""

from cp_shared_kv._version import __version__

__all__ = ["__version__"]

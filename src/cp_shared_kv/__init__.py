"""One logical KV pool for a prefill context-parallel group."""

from cp_shared_kv._version import __version__
from cp_shared_kv.layout import CpSharedKVLayout, KVCapacity

__all__ = ["CpSharedKVLayout", "KVCapacity", "__version__"]

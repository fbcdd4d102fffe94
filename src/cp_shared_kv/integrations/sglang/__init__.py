"""The plugin for stock SGLang: one flag on a prefill server, see docs/sglang.md.

Found by SGLang through the entry-point group `sglang.srt.plugins`. No code of SGLang's is copied
and no file of it changed: functions are wrapped by its own hook registry, and two classes are
subclassed. Everything that depends on a release stands in versions.py and the release's module.
"""

FLAG = "--enable-nsa-prefill-cp-shared-kv"
ATTRIBUTE = "enable_nsa_prefill_cp_shared_kv"
"""The flag as a field of SGLang's ServerArgs."""

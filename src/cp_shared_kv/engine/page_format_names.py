"""Which page formats a choice of --kv-cache-dtype means. Arithmetic alone, without torch."""

from __future__ import annotations

from cp_shared_kv.engine.config_values import KVCacheDtype
from cp_shared_kv.memory.formats.sections import FP8_INDEX_HEAD_DIM


def format_names(
    index_head_dim: int, kv_cache_dtype: KVCacheDtype, *, computes_in_bf16: bool
) -> tuple[str, str]:
    """The names of the formats of latent KV and of index K."""
    if kv_cache_dtype == "auto":
        kv_cache_dtype = "bf16" if computes_in_bf16 else "fp32"
    match kv_cache_dtype:
        case "fp32":
            return "fp32", "fp32"
        case "bf16":
            # Index K in fp8, as the production kernels read it. Other widths than theirs have no
            # such kernel, and no reason to lose what bf16 keeps.
            return "bf16", "fp8_scaled" if index_head_dim == FP8_INDEX_HEAD_DIM else "bf16"
        case "fp8_e4m3":
            return "fp8_ds_mla", "fp8_scaled"

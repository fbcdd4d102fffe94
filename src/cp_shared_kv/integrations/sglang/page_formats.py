"""SGLang's DSA pools in the terms of the core: the bytes of their rows and pages."""

from __future__ import annotations

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.integrations.sglang.support import PAGE_SIZE
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPoolSpec


def pool_spec(
    kv_cache_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    index_head_dim: int,
    layer_num: int,
) -> KVPoolSpec:
    """The pages of a pool whose rows have `kv_cache_dim` elements, as SGLang counts them.

    Without scales in the row it is bf16; with them it is FlashMLA's fp8 row, of bytes. Every layer
    has index pages. ConfigError for any other row.
    """
    name = "bf16" if kv_cache_dim == kv_lora_rank + qk_rope_head_dim else "fp8_ds_mla"
    latent = latent_format(
        name, kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim, page_size=PAGE_SIZE
    )
    row_bytes = kv_cache_dim * (2 if name == "bf16" else 1)
    if latent.row_bytes != row_bytes:
        raise ConfigError(
            "bytes of a latent KV row", value=row_bytes, allowed=f"{latent.row_bytes} for {name}"
        )
    index = index_format("fp8_scaled", index_head_dim=index_head_dim, page_size=PAGE_SIZE)
    return KVPoolSpec(latent, index, layer_num, tuple(range(layer_num)))

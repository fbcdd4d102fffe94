"""Bytes of a row in every page format, by the format's name. Arithmetic alone, without torch.

A planner needs no more of a format than this; the formats themselves take their sections from here.
"""

from __future__ import annotations

from cp_shared_kv.errors import ConfigError

BLOCK = 128
"""Values of one fp8 scale."""
SCALE_BYTES = 4
FP8_INDEX_HEAD_DIM = BLOCK
"""The one width of an fp8 index key: a key is one block."""
PLAIN_ITEM_BYTES = {"fp32": 4, "bf16": 2}
"""The formats that store values as they are, without scales."""


def latent_sections(name: str, kv_lora_rank: int, qk_rope_head_dim: int) -> tuple[int, ...]:
    """Bytes of one token in each section of a latent page: fp32, bf16 or fp8_ds_mla.

    ConfigError for an unknown name, and for a latent that is not whole blocks of fp8_ds_mla.
    """
    if name in PLAIN_ITEM_BYTES:
        return ((kv_lora_rank + qk_rope_head_dim) * PLAIN_ITEM_BYTES[name],)
    if name != "fp8_ds_mla":
        raise ConfigError("latent page format", value=name, allowed="fp32, bf16, fp8_ds_mla")
    if kv_lora_rank % BLOCK:
        raise ConfigError(
            "kv_lora_rank for the page format fp8_ds_mla",
            value=kv_lora_rank,
            allowed=f"multiples of {BLOCK}, the values of one scale",
            change="use bf16 or fp32, which take any width",
        )
    return (kv_lora_rank + kv_lora_rank // BLOCK * SCALE_BYTES + 2 * qk_rope_head_dim,)


def index_sections(name: str, index_head_dim: int) -> tuple[int, ...]:
    """Bytes of one token in each section of an index-K page: fp32, bf16 or fp8_scaled.

    ConfigError for an unknown name, and for another width than fp8_scaled has.
    """
    if name in PLAIN_ITEM_BYTES:
        return (index_head_dim * PLAIN_ITEM_BYTES[name],)
    if name != "fp8_scaled":
        raise ConfigError("index page format", value=name, allowed="fp32, bf16, fp8_scaled")
    if index_head_dim != FP8_INDEX_HEAD_DIM:
        raise ConfigError(
            "index_head_dim for the page format fp8_scaled",
            value=index_head_dim,
            allowed=f"{FP8_INDEX_HEAD_DIM}, the values of one scale",
            change="use bf16 or fp32, which take any width",
        )
    return (index_head_dim, SCALE_BYTES)

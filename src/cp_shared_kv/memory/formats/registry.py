"""Every page format by its name, at a model's widths."""

from __future__ import annotations

from cp_shared_kv.memory.formats.block_fp8 import ScaleKind
from cp_shared_kv.memory.formats.fp8_ds_mla import Fp8DsMlaFormat
from cp_shared_kv.memory.formats.fp8_scaled import Fp8ScaledFormat
from cp_shared_kv.memory.formats.plain import PLAIN_TYPES, PlainIndexFormat, PlainLatentFormat
from cp_shared_kv.memory.formats.sections import index_sections, latent_sections
from cp_shared_kv.memory.page_format import IndexFormat, LatentFormat, RopePairing


def latent_format(
    name: str,
    *,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    rope_style: RopePairing = "interleaved",
    rope_pairing: RopePairing = "interleaved",
    scale_kind: ScaleKind = "fp32",
) -> LatentFormat:
    """The latent page format `name`: fp32, bf16 or fp8_ds_mla.

    `rope_style` is the pairing the model rotates by, `rope_pairing` where the two of a pair lie in
    the stored row. Both are part of the fingerprint, for neither shows in the widths. `scale_kind`
    is for formats with scales. Raises ConfigError for an unknown name, and for a width that the
    format does not take.
    """
    rope = f"rope_style={rope_style} rope_pairing={rope_pairing}"
    latent_sections(name, kv_lora_rank, qk_rope_head_dim)  # refuses what there is no format for
    if name in PLAIN_TYPES:
        return PlainLatentFormat.make(name, kv_lora_rank, qk_rope_head_dim, page_size, rope)
    return Fp8DsMlaFormat.make(kv_lora_rank, qk_rope_head_dim, page_size, scale_kind, rope)


def index_format(
    name: str,
    *,
    index_head_dim: int,
    page_size: int,
    rope_style: RopePairing = "half-split",
    rope_pairing: RopePairing = "half-split",
    scale_kind: ScaleKind = "fp32",
) -> IndexFormat:
    """The index-K page format `name`: fp32, bf16 or fp8_scaled; see `latent_format`.

    DeepSeek's indexer rotates half-split pairs, GLM's interleaved ones. None of the formats
    applies a Hadamard transform.
    """
    rope = f"rope_style={rope_style} rope_pairing={rope_pairing}"
    index_sections(name, index_head_dim)  # refuses what there is no format for
    if name in PLAIN_TYPES:
        return PlainIndexFormat.make(name, index_head_dim, page_size, rope)
    return Fp8ScaledFormat.make(index_head_dim, page_size, scale_kind, rope)

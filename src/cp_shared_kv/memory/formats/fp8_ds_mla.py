"""The latent format of FlashMLA's sparse decoding kernels (its V32_FP8Sparse, vLLM's fp8_ds_mla).

At 512 + 64 dimensions a row has 656 bytes: [0, 512) e4m3, [512, 528) four fp32 scales, one for
each 128 of them, [528, 656) 64 rope dimensions in bf16. A page is its rows, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from cp_shared_kv.memory.formats.block_fp8 import (
    ScaleKind,
    dequantise,
    quantise,
    reinterpret,
)
from cp_shared_kv.memory.formats.sections import BLOCK, SCALE_BYTES, latent_sections
from cp_shared_kv.memory.page_format import LatentFormat


@dataclass(frozen=True)
class Fp8DsMlaFormat(LatentFormat):
    """e4m3 latent, its scales, bf16 rope. `kv_lora_rank` is a multiple of 128."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    scale_kind: ScaleKind

    @classmethod
    def make(
        cls,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        page_size: int,
        scale_kind: ScaleKind,
        rope: str,
    ) -> Self:
        """At these widths; `rope` is a part of the fingerprint. ConfigError for a latent that is
        not whole blocks."""
        sections = latent_sections("fp8_ds_mla", kv_lora_rank, qk_rope_head_dim)
        fingerprint = (
            f"latent:fp8_ds_mla page_size={page_size} latent={kv_lora_rank}xe4m3"
            f" rope={qk_rope_head_dim}xbf16 scale={scale_kind} hadamard=no {rope}"
        )
        widths = kv_lora_rank, qk_rope_head_dim
        return cls("fp8_ds_mla", page_size, sections, fingerprint, *widths, scale_kind)

    def encode(self, latent: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        codes, scales = quantise(latent, self.scale_kind)
        rest = [reinterpret(part, torch.uint8) for part in (scales, k_pe.bfloat16())]
        return torch.cat((codes, *rest), dim=1)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        rope_start = self.kv_lora_rank + self.kv_lora_rank // BLOCK * SCALE_BYTES
        codes, scales, rope = rows.tensor_split((self.kv_lora_rank, rope_start), dim=1)
        latent = dequantise(codes, reinterpret(scales, torch.float32), dtype)
        return latent, reinterpret(rope, torch.bfloat16).to(dtype)

"""Rows of one float type, fp32 or bf16, as the values are: no scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from cp_shared_kv.memory.formats.sections import index_sections, latent_sections
from cp_shared_kv.memory.page_format import IndexFormat, LatentFormat

PLAIN_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What the two formats of either kind store, by name."""


@dataclass(frozen=True)
class PlainLatentFormat(LatentFormat):
    """The latent, then the rope dimensions; decoding to `stored` returns the bits as they are."""

    kv_lora_rank: int
    stored: torch.dtype

    @classmethod
    def make(
        cls, name: str, kv_lora_rank: int, qk_rope_head_dim: int, page_size: int, rope: str
    ) -> Self:
        """At these widths; `name` is one of PLAIN_TYPES, `rope` a part of the fingerprint."""
        fingerprint = (
            f"latent:{name} page_size={page_size} latent={kv_lora_rank}x{name}"
            f" rope={qk_rope_head_dim}x{name} scale=none hadamard=no {rope}"
        )
        stored = PLAIN_TYPES[name]
        sections = latent_sections(name, kv_lora_rank, qk_rope_head_dim)
        return cls(name, page_size, sections, fingerprint, kv_lora_rank, stored)

    def encode(self, latent: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        parts = (latent.to(self.stored), k_pe.to(self.stored))
        return torch.cat(parts, dim=1).view(torch.uint8)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        values = rows.view(self.stored).to(dtype)
        return values[:, : self.kv_lora_rank], values[:, self.kv_lora_rank :]


@dataclass(frozen=True)
class PlainIndexFormat(IndexFormat):
    """The index key; decoding to `stored` returns the bits as they are."""

    stored: torch.dtype

    @classmethod
    def make(cls, name: str, index_head_dim: int, page_size: int, rope: str) -> Self:
        """At this width; `name` is one of PLAIN_TYPES, `rope` a part of the fingerprint."""
        fingerprint = (
            f"index:{name} page_size={page_size} key={index_head_dim}x{name}"
            f" scale=none hadamard=no {rope}"
        )
        stored = PLAIN_TYPES[name]
        return cls(name, page_size, index_sections(name, index_head_dim), fingerprint, stored)

    def encode(self, index_k: torch.Tensor) -> torch.Tensor:
        return index_k.to(self.stored).contiguous().view(torch.uint8)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rows.view(self.stored).to(dtype)

"""The index-K format of DeepGEMM's paged MQA logits kernel.

A page of 64 tokens has 8,448 bytes: 64 keys of 128 e4m3, then 64 fp32 scales, one a key.
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
from cp_shared_kv.memory.formats.sections import FP8_INDEX_HEAD_DIM, index_sections
from cp_shared_kv.memory.page_format import IndexFormat


@dataclass(frozen=True)
class Fp8ScaledFormat(IndexFormat):
    """Two sections: the e4m3 key of each token, then the scale of each."""

    scale_kind: ScaleKind

    @classmethod
    def make(cls, index_head_dim: int, page_size: int, scale_kind: ScaleKind, rope: str) -> Self:
        """`rope` is a part of the fingerprint. ConfigError for another width than the one."""
        sections = index_sections("fp8_scaled", index_head_dim)
        fingerprint = (
            f"index:fp8_scaled page_size={page_size} key={index_head_dim}xe4m3"
            f" scale={scale_kind} hadamard=no {rope}"
        )
        return cls("fp8_scaled", page_size, sections, fingerprint, scale_kind)

    def encode(self, index_k: torch.Tensor) -> torch.Tensor:
        codes, scales = quantise(index_k, self.scale_kind)
        return torch.cat((codes, reinterpret(scales, torch.uint8)), dim=1)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        codes, scales = self.quantised(rows)
        return dequantise(codes, scales.unsqueeze(1), dtype)

    def quantised(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = rows.tensor_split((FP8_INDEX_HEAD_DIM,), dim=1)
        return codes.contiguous(), reinterpret(scales, torch.float32).flatten()

"""How one token's row and one page of rows are laid out in bytes, each layout with a fingerprint.

Everything that moves or stores KV handles it as these bytes. Only `encode` and `decode` know what
they mean, so the shared and the replicated run cannot differ by a conversion.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from cp_shared_kv.errors import ConfigError, LayoutError

PageKind = Literal["latent", "index"]
PAGE_KINDS: tuple[PageKind, ...] = ("latent", "index")
RopePairing = Literal["interleaved", "half-split"]
"""Which two elements form a rotated pair: (2i, 2i+1), or (i, i + half)."""


@dataclass(frozen=True)
class PageFormat:
    """The bytes of a page: section 0 of all its tokens, then section 1 of all, and so on.

    A token's row is its part of every section, one after the other. A slot is
    `page * page_size + offset`. `fingerprint` is equal exactly when two ends can read each
    other's pages.
    """

    name: str
    page_size: int
    sections: tuple[int, ...]
    """Bytes of one token in each section."""
    fingerprint: str

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ConfigError("page size", value=self.page_size, allowed="1 or more")
        if not self.sections or min(self.sections) < 1:
            raise ConfigError("page sections", value=self.sections, allowed="widths of 1 or more")

    @property
    def row_bytes(self) -> int:
        return sum(self.sections)

    @property
    def page_bytes(self) -> int:
        return self.row_bytes * self.page_size

    def gather_rows(self, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Read rows: pages u8[*, page_bytes], slots i64[n] -> u8[n, row_bytes], a fresh tensor."""
        _check_slots(slots)
        if len(self.sections) == 1:
            return pages.view(-1, self.row_bytes).index_select(0, slots)
        rows = pages.new_empty(len(slots), self.row_bytes)
        page, offset = slots // self.page_size, slots % self.page_size
        for section, columns in self._sections(pages):
            rows[:, columns] = section[page, offset]
        return rows

    def scatter_rows(self, pages: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows u8[n, row_bytes] to slots i64[n], each named once, of u8[*, page_bytes]."""
        _check_slots(slots)
        if rows.shape != (len(slots), self.row_bytes):
            raise LayoutError(
                f"rows of page format {self.name}",
                value=tuple(rows.shape),
                allowed=f"{(len(slots), self.row_bytes)}: one row for each slot",
            )
        if len(self.sections) == 1:
            places = pages.view(-1, self.row_bytes)
            if self.row_bytes % 4 == 0:  # torch copies 4-byte words about 5 times as fast as bytes
                places, rows = places.view(torch.int32), rows.view(torch.int32)
            places.index_copy_(0, slots, rows)
            return
        page, offset = slots // self.page_size, slots % self.page_size
        for section, columns in self._sections(pages):
            section[page, offset] = rows[:, columns]

    def _sections(self, pages: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice]]:
        """Each section of the pages as u8[*, page_size, width], and its columns in a row."""
        for width, end in zip(self.sections, accumulate(self.sections), strict=True):
            start = end - width
            in_page = pages[:, start * self.page_size : end * self.page_size]
            yield in_page.unflatten(1, (self.page_size, width)), slice(start, end)


class LatentFormat(PageFormat, ABC):
    """Rows of latent KV: the compressed latent and the shared rotated key of one token."""

    @abstractmethod
    def encode(self, latent: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        """latent [T, kv_lora_rank], k_pe [T, qk_rope_head_dim], any float -> u8[T, row_bytes]."""

    @abstractmethod
    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """rows u8[n, row_bytes] -> latent [n, kv_lora_rank], k_pe [n, qk_rope_head_dim]."""


class IndexFormat(PageFormat, ABC):
    """Rows of index K: the key that one token shows to the indexer."""

    @abstractmethod
    def encode(self, index_k: torch.Tensor) -> torch.Tensor:
        """index_k [T, index_head_dim], any float -> u8[T, row_bytes]."""

    @abstractmethod
    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """rows u8[n, row_bytes] -> [n, index_head_dim]."""


@dataclass(frozen=True)
class Fp32LatentFormat(LatentFormat):
    """fp32 latent, then fp32 rope; decoding to fp32 returns the encoded fp32 values exactly."""

    kv_lora_rank: int

    def encode(self, latent: torch.Tensor, k_pe: torch.Tensor) -> torch.Tensor:
        return torch.cat((latent.float(), k_pe.float()), dim=1).view(torch.uint8)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        values = rows.view(torch.float32).to(dtype)
        return values[:, : self.kv_lora_rank], values[:, self.kv_lora_rank :]


@dataclass(frozen=True)
class Fp32IndexFormat(IndexFormat):
    """fp32 index K; decoding to fp32 returns the encoded fp32 values exactly."""

    def encode(self, index_k: torch.Tensor) -> torch.Tensor:
        return index_k.float().contiguous().view(torch.uint8)

    def decode(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rows.view(torch.float32).to(dtype)


def latent_format(
    name: str,
    *,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    rope_style: RopePairing = "interleaved",
    rope_pairing: RopePairing = "interleaved",
) -> LatentFormat:
    """The latent page format `name` at a model's widths; ConfigError for an unknown name.

    `rope_style` is the pairing the model rotates by, `rope_pairing` where the two of a pair lie in
    the stored row. Both are part of the fingerprint, for neither shows in the widths.
    """
    if name != "fp32":
        raise ConfigError("latent page format", value=name, allowed="fp32")
    fingerprint = (
        f"latent:fp32 page_size={page_size} latent={kv_lora_rank}xfp32 rope={qk_rope_head_dim}xfp32"
        f" scale=none hadamard=no rope_style={rope_style} rope_pairing={rope_pairing}"
    )
    sections = (4 * (kv_lora_rank + qk_rope_head_dim),)
    return Fp32LatentFormat(name, page_size, sections, fingerprint, kv_lora_rank)


def index_format(
    name: str,
    *,
    index_head_dim: int,
    page_size: int,
    rope_style: RopePairing = "half-split",
    rope_pairing: RopePairing = "half-split",
) -> IndexFormat:
    """The index-K page format `name` at a model's width; ConfigError for an unknown name.

    DeepSeek's indexer rotates half-split pairs, GLM's interleaved ones; see `latent_format`.
    """
    if name != "fp32":
        raise ConfigError("index page format", value=name, allowed="fp32")
    fingerprint = (
        f"index:fp32 page_size={page_size} key={index_head_dim}xfp32"
        f" scale=none hadamard=no rope_style={rope_style} rope_pairing={rope_pairing}"
    )
    return Fp32IndexFormat(name, page_size, (4 * index_head_dim,), fingerprint)


def _check_slots(slots: torch.Tensor) -> None:
    # 576 * slot passes 2^31 at slot 3.73 million, so narrower indices would wrap silently.
    if slots.dtype != torch.int64 or slots.dim() != 1:
        raise LayoutError(
            "slots", value=f"{slots.dtype} of shape {tuple(slots.shape)}", allowed="int64[n]"
        )

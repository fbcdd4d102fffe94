"""How one token's row and one page of rows are laid out in bytes, each layout with a fingerprint.

Everything that moves or stores KV handles it as these bytes. Only `encode` and `decode` know what
they mean, so the shared and the replicated run cannot differ by a conversion.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
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
            rows = pages.view(-1, self.row_bytes)
            if rows.is_cuda:  # where torch reads word by word, or else byte by byte
                _, rows, _ = self._in_words(rows, rows)
            return rows.index_select(0, slots).view(torch.uint8)
        rows = pages.new_empty(len(slots), self.row_bytes)
        page, offset = slots // self.page_size, slots % self.page_size
        for section, part in self._sections(pages, rows):
            part[:] = section[page, offset]
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
            _, places, rows = self._in_words(pages.view(-1, self.row_bytes), rows)
            places.index_copy_(0, slots, rows)
            return
        page, offset = slots // self.page_size, slots % self.page_size
        for section, part in self._sections(pages, rows):
            section[page, offset] = part

    def _sections(
        self, pages: torch.Tensor, rows: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of each section: of the pages [*, page_size, width], of the rows [n, width]."""
        unit_bytes, pages, rows = self._in_words(pages, rows)
        start = 0
        for width_bytes in self.sections:
            width = width_bytes // unit_bytes
            in_page = pages.narrow(1, start * self.page_size, width * self.page_size)
            yield in_page.unflatten(1, (self.page_size, width)), rows.narrow(1, start, width)
            start += width

    def _in_words(
        self, places: torch.Tensor, rows: torch.Tensor
    ) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Both as 4-byte words where all lies on such, as bytes elsewhere; and the unit's bytes."""
        lengths = [*self.sections]
        for tensor in (places, rows):
            lengths += [tensor.storage_offset(), tensor.stride(0)]
        if any(length % 4 for length in lengths):
            return 1, places, rows
        # torch copies words faster than bytes.
        return 4, places.view(torch.int32), rows.view(torch.int32)


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

    def quantised(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:  # noqa: ARG002
        """rows u8[n, row_bytes] -> e4m3 codes u8[n, index_head_dim] and the scale of each key
        fp32[n], both contiguous; None for a format that stores no such."""
        return None


def _check_slots(slots: torch.Tensor) -> None:
    # 576 * slot passes 2^31 at slot 3.73 million, so narrower indices would wrap silently.
    if slots.dtype != torch.int64 or slots.dim() != 1:
        raise LayoutError(
            "slots", value=f"{slots.dtype} of shape {tuple(slots.shape)}", allowed="int64[n]"
        )

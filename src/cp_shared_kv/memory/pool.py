"""One rank's physical pages: latent KV of every layer, and index K of the layers that own it.

Buffer order: latent pages of layer 0, 1, ...; then index pages of each layer with an indexer. The
pages of one (kind, layer) are consecutive, from physical page 0 (padding) to the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch

from cp_shared_kv.errors import CapacityError, ConfigError, LayoutError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalLocs
from cp_shared_kv.memory.buffers import Buffer
from cp_shared_kv.memory.device_copy import to_device
from cp_shared_kv.memory.page_format import (
    PAGE_KINDS,
    IndexFormat,
    LatentFormat,
    PageFormat,
    PageKind,
)
from cp_shared_kv.memory.pool_sizes import PoolSizes


@dataclass(frozen=True)
class KVPoolSpec:
    """What every page of a model holds; the same on all ranks, and at both ends of a transfer."""

    latent: LatentFormat
    index: IndexFormat
    num_layers: int
    index_layers: tuple[int, ...]
    """Layers with an indexer of their own, ascending; the others have no index pages."""

    def __post_init__(self) -> None:
        if self.latent.page_size != self.index.page_size:
            raise ConfigError(
                "page size of index K",
                value=self.index.page_size,
                allowed=f"{self.latent.page_size}, as for latent KV: one plan serves both",
            )
        _ = self.sizes  # checks the layers

    @cached_property
    def sizes(self) -> PoolSizes:
        """The bytes of all this, which need no torch."""
        return PoolSizes(
            page_size=self.latent.page_size,
            latent_row_bytes=self.latent.row_bytes,
            index_row_bytes=self.index.row_bytes,
            num_layers=self.num_layers,
            index_layers=self.index_layers,
        )

    @property
    def page_size(self) -> int:
        return self.latent.page_size

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one physical page over all layers."""
        return self.sizes.bytes_per_page

    @property
    def bytes_per_token(self) -> int:
        return self.sizes.bytes_per_token

    def format(self, kind: PageKind) -> PageFormat:
        return self.latent if kind == "latent" else self.index

    def page_bytes(self, kind: PageKind) -> int:
        """Bytes of one page of one layer."""
        return self.format(kind).page_bytes

    def layers(self, kind: PageKind) -> tuple[int, ...]:
        return tuple(range(self.num_layers)) if kind == "latent" else self.index_layers

    def pool_bytes(self, physical_pages: int) -> int:
        """Bytes of a rank's pool, its padding page included."""
        return self.sizes.pool_bytes(physical_pages)

    def page_offset_bytes(self, kind: PageKind, layer: int, physical_pages: int) -> int:
        """Where physical page 0 of that layer begins in a pool of so many pages."""
        try:
            before = self.layers(kind).index(layer)
        except ValueError:
            raise LayoutError(
                f"layer without {kind} pages", value=layer, allowed=str(self.layers(kind))
            ) from None
        offset = before * self.page_bytes(kind)
        if kind == "index":
            offset += self.latent.page_bytes * self.num_layers
        return (physical_pages + 1) * offset


@dataclass(frozen=True)
class WritePlan:
    """Which rows of a batch this rank keeps, and where. Made once a batch, used by every layer."""

    rows: torch.Tensor
    """i64[K]: the batch's rows whose page this rank owns."""
    physical_locs: torch.Tensor
    """i64[K]: their places in this rank's pool."""

    @classmethod
    def build(cls, layout: CpSharedKVLayout, logical_locs: LogicalLocs) -> Self:
        """logical_locs i64[T], one a row of the batch; locs of the padding page are left out."""
        rows = np.flatnonzero(layout.owned_by_this_rank(logical_locs))
        physical_locs = layout.logical_locs_to_physical(LogicalLocs(logical_locs[rows]))
        return cls(torch.from_numpy(rows), torch.from_numpy(physical_locs))

    def padded(self, length: int) -> Self:
        """With entries up to `length` that kernels pass over: a CUDA graph's plan has one length.

        CapacityError when there are more already.
        """
        if len(self.rows) > length:
            raise CapacityError("rows of a write plan", value=len(self.rows), allowed=f"{length}")
        padding = torch.zeros(length - len(self.rows), dtype=torch.int64)
        return type(self)(torch.cat((self.rows, padding)), torch.cat((self.physical_locs, padding)))

    def to(self, device: torch.device) -> Self:
        """The plan in that device's memory; the host does not wait for the copy."""
        return type(self)(to_device(self.rows, device), to_device(self.physical_locs, device))


class KVPool:
    """A rank's pages in one buffer: its own, or a peer's that this process has mapped."""

    def __init__(self, spec: KVPoolSpec, physical_pages: int, buffer: Buffer) -> None:
        """CapacityError when the buffer is too small for so many pages and the padding page."""
        needed_bytes = spec.pool_bytes(physical_pages)
        if buffer.nbytes < needed_bytes:
            raise CapacityError(
                f"buffer for {physical_pages} pages",
                value=f"{buffer.nbytes} bytes",
                allowed=f"{needed_bytes} bytes or more",
            )
        self.spec = spec
        self.physical_pages = physical_pages
        self.buffer = buffer
        self._pages: dict[tuple[PageKind, int], torch.Tensor] = {}
        for kind in PAGE_KINDS:
            layer_bytes = (physical_pages + 1) * spec.page_bytes(kind)
            for layer in spec.layers(kind):
                offset = self.page_offset_bytes(kind, layer)
                layer_pages = buffer.tensor[offset : offset + layer_bytes]
                self._pages[kind, layer] = layer_pages.view(-1, spec.page_bytes(kind))

    def pages(self, kind: PageKind, layer: int) -> torch.Tensor:
        """u8[physical_pages + 1, page_bytes], a view of the buffer; page 0 is padding."""
        return self._pages[kind, layer]

    def page_offset_bytes(self, kind: PageKind, layer: int) -> int:
        """Where that layer's physical page 0 begins in the buffer."""
        return self.spec.page_offset_bytes(kind, layer, self.physical_pages)

    def write(self, kind: PageKind, layer: int, rows: torch.Tensor, plan: WritePlan) -> None:
        """Keep the owned ones of the batch's rows u8[T, row_bytes]; the other ranks keep theirs."""
        owned = rows.index_select(0, plan.rows)
        self.spec.format(kind).scatter_rows(self.pages(kind, layer), plan.physical_locs, owned)

"""Where a forward pass finds its index K: in the pool, or read into scratch block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cp_shared_kv.memory.page_format import IndexFormat
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.reads.index_pieces import IndexPlan
from cp_shared_kv.reads.plan import ReadPlan
from cp_shared_kv.reads.prefix_reader import PrefixReader
from cp_shared_kv.reads.read_ahead import Lane, LayerPages
from cp_shared_kv.reads.scratch import Scratch


@dataclass(frozen=True)
class IndexKeys:
    """The index keys of consecutive positions of one request."""

    request: int
    start: int
    """The position of the first."""
    rows: torch.Tensor
    """u8[n, row_bytes]."""
    page_format: IndexFormat
    dtype: torch.dtype
    """What keys are decoded to."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def keys(self) -> torch.Tensor:
        """[n, index_head_dim], decoded at each access."""
        return self.page_format.decode(self.rows, self.dtype)

    @property
    def quantised(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Codes u8[n, index_head_dim] and scales fp32[n], copied at each access, where keys are
        stored so."""
        return self.page_format.quantised(self.rows)


class IndexSource:
    """The index K of one batch, a layer at a time. On a sharded pool it takes scratch."""

    def __init__(
        self,
        pool: KVPool,
        plan: ReadPlan,
        index: IndexPlan,
        reader: PrefixReader,
        scratch: Scratch,
        dtype: torch.dtype,
        lane: Lane | None = None,
    ) -> None:
        """dtype: what keys are decoded to. lane: to read what is one block a layer ahead.
        CapacityError past the scratch limit."""
        self._pool, self._plan, self._index = pool, plan, index
        self._reader, self._dtype = reader, dtype
        spec = pool.spec
        chunk_pages = -(-len(plan.new_locs) // spec.page_size)
        pages = 0
        if spec.index_layers and not plan.in_place:
            pages = index.room_pages + chunk_pages
        first, *others = index.blocks
        if others:
            lane = None
        page_bytes, layers = spec.page_bytes("index"), 1 if lane is None else 2
        taken = scratch.take("index pages", layers * pages * page_bytes)
        taken = taken.view(layers, pages, page_bytes)
        self._layers = LayerPages("index", spec.index_layers, first.pages, reader, taken, lane)
        self._scratch = taken[0]

    def store(self, layer: int, chunk_rows: torch.Tensor) -> None:
        """The batch's new rows u8[T, row_bytes] of a layer, which the pool has. Collective.

        What is one block is read here, so that nothing of it is left to `pieces`.
        """
        if self._plan.in_place:
            return
        if len(self._index.blocks) == 1:
            self._scratch = self._layers.read(layer)
        self._pool.spec.index.scatter_rows(self._scratch, self._index.chunk_slots, chunk_rows)

    def pieces(self, layer: int, seen: Sequence[int]) -> Iterator[IndexKeys]:
        """For each request the keys of its first `seen` positions, by ascending position.

        Collective: every rank goes through all of it, also one that needs no key.
        """
        pages = self._pool.pages("index", layer) if self._plan.in_place else self._scratch
        index_format = self._pool.spec.index
        for block in self._index.blocks:
            if len(self._index.blocks) > 1:
                self._reader.read("index", layer, block.pages, self._scratch)
            for piece in block.pieces:
                slots = piece.slots[: max(0, seen[piece.request] - piece.start)]
                if len(slots):
                    rows = index_format.gather_rows(pages, slots)
                    start = piece.start
                    yield IndexKeys(piece.request, start, rows, index_format, self._dtype)

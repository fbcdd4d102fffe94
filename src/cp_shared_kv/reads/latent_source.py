"""Where a forward pass finds its latent KV: all of it in pages, or just what was selected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

from cp_shared_kv.errors import CapacityError
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.reads.plan import ReadPlan
from cp_shared_kv.reads.prefix_reader import PrefixReader
from cp_shared_kv.reads.read_ahead import Lane, LayerPages
from cp_shared_kv.reads.scratch import Scratch


class LatentSource(Protocol):
    """The latent KV of one batch, a layer at a time."""

    def store(self, layer: int, chunk_rows: torch.Tensor) -> None:
        """The batch's new rows u8[T, row_bytes] of a layer, which the pool has. Collective."""
        ...

    def bring(self, layer: int, selected: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Make readable what tokens attend to, some tokens after the other. Not collective.

        selected i64[t, k]: slots of the read plan, below 0 for none. Gives parts of the t tokens
        and the places i64[n, k] of their slots, -1 for none, which hold until the next part.
        """
        ...

    def gather(self, layer: int, places: torch.Tensor) -> torch.Tensor:
        """The rows u8[n, row_bytes] at places i64[n]."""
        ...

    def rows(self, layer: int) -> torch.Tensor:
        """All rows u8[*, row_bytes] as places index them, for a format of one section."""
        ...


class WholePrefix:
    """Every page of the batch's prefixes, in scratch; or the pool itself where it has them all."""

    def __init__(
        self,
        pool: KVPool,
        plan: ReadPlan,
        reader: PrefixReader,
        scratch: Scratch,
        lane: Lane | None = None,
    ) -> None:
        """lane: to read a layer ahead. CapacityError past the scratch limit."""
        self._pool, self._plan = pool, plan
        page_bytes, layers = pool.spec.page_bytes("latent"), 1 if lane is None else 2
        taken = scratch.take("latent pages", layers * plan.scratch_pages * page_bytes)
        taken = taken.view(layers, plan.scratch_pages, page_bytes)
        self._layers = LayerPages("latent", pool.spec.layers("latent"), plan, reader, taken, lane)
        self._scratch = taken[0]

    def store(self, layer: int, chunk_rows: torch.Tensor) -> None:
        if not self._plan.in_place:
            self._scratch = self._layers.read(layer)
            self._pool.spec.latent.scatter_rows(self._scratch, self._plan.chunk_slots, chunk_rows)

    def bring(
        self,
        layer: int,  # noqa: ARG002 (all of it is here)
        selected: torch.Tensor,
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        if len(selected):
            yield slice(0, len(selected)), selected

    def gather(self, layer: int, places: torch.Tensor) -> torch.Tensor:
        return self._pool.spec.latent.gather_rows(self._pages(layer), places)

    def rows(self, layer: int) -> torch.Tensor:
        return self._pages(layer).view(-1, self._pool.spec.latent.row_bytes)

    def _pages(self, layer: int) -> torch.Tensor:
        return self._pool.pages("latent", layer) if self._plan.in_place else self._scratch


class RowReader(Protocol):
    """Brings single rows of latent KV out of their owners' pools, each once."""

    def begin(self, plan: ReadPlan, most_rows: int) -> None:
        """Prepare for one forward pass. Not collective: a page reader's `begin` lines the ranks up.

        Takes scratch for `most_rows` of prefixes and for the chunk: CapacityError past the limit.
        """
        ...

    def read(
        self, layer: int, selected: torch.Tensor, chunk_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The selected rows of a layer, and where each slot finds its own. Not collective.

        selected [t, k] of int32 or int64: slots of the plan, below 0 for none. chunk_rows
        u8[T, row_bytes]: the batch's new tokens. Returns rows u8[*, row_bytes], the chunk first,
        and places [t, k] in them, of the same type, -1 for none. Both hold until the next read.
        """
        ...


class SelectedRows:
    """Only the rows that this rank's tokens have selected, for as many tokens as there is room."""

    def __init__(self, plan: ReadPlan, reader: RowReader, page_size: int, most_rows: int) -> None:
        """most_rows: of prefixes at once. CapacityError past the scratch limit."""
        self._reader = reader
        self._most_rows = min(most_rows, len(plan.logical_pages) * page_size)
        self._fits_all = self._most_rows == len(plan.logical_pages) * page_size
        reader.begin(plan, self._most_rows)
        self._chunk_rows = self._rows = torch.empty(0, dtype=torch.uint8)

    def store(self, layer: int, chunk_rows: torch.Tensor) -> None:  # noqa: ARG002 (brought later)
        self._chunk_rows = chunk_rows

    def bring(self, layer: int, selected: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        tokens, k = selected.shape
        at_once = tokens if self._fits_all else self._most_rows // max(1, k)
        if tokens and not at_once:
            raise CapacityError(
                "rows that one token may select",
                value=k,
                allowed=f"at most {self._most_rows}, for which there is scratch",
                change="raise --kv-scratch-tokens",
            )
        for start in range(0, tokens, max(1, at_once)):
            part = slice(start, min(start + at_once, tokens))
            self._rows, places = self._reader.read(layer, selected[part], self._chunk_rows)
            yield part, places

    def gather(self, layer: int, places: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return self._rows.index_select(0, places)

    def rows(self, layer: int) -> torch.Tensor:  # noqa: ARG002
        return self._rows

"""Shard-aware reads of latent KV: only the rows that this rank's tokens have selected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.kernels import ALIGNMENT_BYTES
from cp_shared_kv.memory.page_format import LatentFormat
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.reads.page_sources import PageSources
from cp_shared_kv.reads.peer_pull import PeerPullReader
from cp_shared_kv.reads.plan import ReadPlan
from cp_shared_kv.reads.scratch import Scratch

if TYPE_CHECKING:
    from cp_shared_kv.kernels.select_rows import SelectedRows


def fetches_rows(latent: LatentFormat) -> bool:
    """Whether its rows are whole multiples of 16 bytes, one after the other."""
    return len(latent.sections) == 1 and latent.row_bytes % ALIGNMENT_BYTES == 0


def check_rows(latent: LatentFormat) -> None:
    """ConfigError for a format whose rows a kernel cannot fetch one by one."""
    if not fetches_rows(latent):
        raise ConfigError(
            "rows of latent KV that are read one by one",
            value=f"sections of {latent.sections} bytes",
            allowed=f"one section of a multiple of {ALIGNMENT_BYTES} bytes",
            change="read whole pages with this page format: --kv-read auto, no --kv-scratch-tokens",
        )


class SelectedRowsReader:
    """A RowReader between GPUs: each selected row once, out of its owner's pool.

    No rank takes part in another's read, and the host never learns what was selected.
    """

    def __init__(
        self, reader: PeerPullReader, cp_size: int, pool: KVPool, scratch: Scratch
    ) -> None:
        """reader: the one that pulls whole pages from the same pools. ConfigError for a latent
        format of other rows than `fetches_rows` says."""
        check_rows(pool.spec.latent)
        self._reader = reader
        self._cp_size = cp_size
        self._pool = pool
        self._scratch = scratch
        self._sources: PageSources | None = None
        self._selected: SelectedRows | None = None
        self._rows = torch.empty(0, dtype=torch.uint8)
        self._chunk_rows = 0

    def begin(self, plan: ReadPlan, most_rows: int) -> None:
        """See RowReader."""
        # Here, since without a GPU there need not be a triton.
        from cp_shared_kv.kernels.select_rows import SelectedRows

        latent = self._pool.spec.latent
        self._sources = self._reader.sources(plan, "latent")
        slots = len(plan.logical_pages) * latent.page_size
        device = self._pool.buffer.tensor.device
        self._selected = SelectedRows.make(slots, most_rows, device)
        self._chunk_rows = len(plan.new_locs)
        rows = self._chunk_rows + len(self._selected.rows)
        # In the place of whole pages: a batch has one or the other.
        taken = self._scratch.take("latent pages", rows * latent.row_bytes)
        self._rows = taken.view(rows, latent.row_bytes)

    def read(
        self, layer: int, selected: torch.Tensor, chunk_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See RowReader. Of the rows only those that are named by a place mean anything."""
        from cp_shared_kv.kernels.pull_rows import pull_rows

        assert self._sources is not None
        assert self._selected is not None
        indices = selected.to(torch.int32).contiguous()
        places = torch.empty_like(indices)
        self._selected.select(indices, places, self._chunk_rows)
        pull_rows(
            self._pool.pages("latent", layer),
            self._sources.sources,
            self._pool.spec.page_size,
            self._selected.rows[: indices.numel()],  # there are no more, and so no more programs
            self._selected.count,
            self._cp_size,
            self._rows[self._chunk_rows :],
        )
        self._rows[: self._chunk_rows].copy_(chunk_rows)
        return self._rows, places.to(selected.dtype)

"""Selected rows by one-sided copies out of the owners' mapped buffers (one host)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.reads.plan import ReadPlan
from cp_shared_kv.reads.scratch import Scratch


class PullRowsReader:
    """A RowReader over pools in shared memory. The page reader's `begin` lines the ranks up."""

    def __init__(self, pools: Sequence[KVPool], scratch: Scratch) -> None:
        """pools: every rank's pool as this process has mapped it, by rank."""
        self._pools = pools
        self._latent = pools[0].spec.latent
        self._scratch = scratch
        self._plan: ReadPlan | None = None
        self._rows = torch.empty(0, dtype=torch.uint8)
        self.rows_read = 0

    @property
    def bytes_read(self) -> int:
        """The bytes of the rows read since the start."""
        return self.rows_read * self._latent.row_bytes

    def begin(self, plan: ReadPlan, most_rows: int) -> None:
        self._plan = plan
        rows, row_bytes = len(plan.new_locs) + most_rows, self._latent.row_bytes
        # In the place of whole pages: a batch has one or the other.
        self._rows = self._scratch.take("latent pages", rows * row_bytes).view(rows, row_bytes)

    def read(
        self, layer: int, selected: torch.Tensor, chunk_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self._plan
        assert plan is not None, "begin comes first"
        page_size, first_row = self._latent.page_size, len(chunk_rows)
        prefix_slots = len(plan.logical_pages) * page_size
        # A mark for each slot numbers them in a fraction of the time that sorting takes. What is
        # no slot of a prefix marks the place past the last.
        in_prefix = (selected >= 0) & (selected < prefix_slots)
        marks = torch.zeros(prefix_slots + 1, dtype=torch.bool)
        marks[torch.where(in_prefix, selected, prefix_slots)] = True
        wanted = marks[:prefix_slots].nonzero().flatten()  # ascending, so owner after owner
        numbers = marks.cumsum(0)
        places = torch.where(
            in_prefix,
            numbers[selected.clamp(0, prefix_slots)] + (first_row - 1),
            (selected - prefix_slots).clamp(min=-1),
        )
        self._rows[:first_row] = chunk_rows
        starts = torch.tensor(plan.owner_starts) * page_size
        bounds = torch.searchsorted(wanted, starts).tolist()
        physical_slots = plan.physical_pages[wanted // page_size] * page_size + wanted % page_size
        for pool, start, stop in zip(self._pools, bounds, bounds[1:], strict=False):
            self._rows[first_row + start : first_row + stop] = self._latent.gather_rows(
                pool.pages("latent", layer), physical_slots[start:stop]
            )
        self.rows_read += len(wanted)
        return self._rows[: first_row + len(wanted)], places

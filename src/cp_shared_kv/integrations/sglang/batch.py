"""One extend batch on a shared pool: which pages are copied, and where everything is found.

Scratch is page-formatted, so that SGLang's kernels read it by page tables as they read a pool:
the unique prefix pages, owner after owner; then the pages that the batch begins, request after
request; then one page that padding points at. A prefix may end inside a page: that page is
copied, and the chunk goes on in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.memory.device_copy import to_device
from cp_shared_kv.memory.pool import WritePlan
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan


@dataclass(frozen=True)
class SharedBatch:
    """The same on all ranks but for `writes`, which are this rank's."""

    plan: ReadPlan
    """What the reader copies: its pages are the first of scratch."""
    scratch_pages: int
    """Prefix pages, the batch's own pages, and the page of padding, which is the last."""
    page_table: torch.Tensor
    """i32[logical pages + 1]: the scratch page of each logical page; padding's for all others."""
    chunk_slots: torch.Tensor
    """i64[T]: where each new token is staged."""
    writes: WritePlan
    """The owned rows of scratch, by slot, and where they are kept."""
    page_size: int

    @classmethod
    def build(
        cls, layout: CpSharedKVLayout, requests: Sequence[BatchSpan], device: torch.device
    ) -> Self:
        """Plan a batch, on the host. LayoutError for one that contradicts itself, see ReadPlan."""
        plan = ReadPlan.build(layout, requests)
        page_size = layout.page_size
        fresh = [r.logical_pages[_pages(r.prefix_len, page_size) :] for r in requests]
        fresh = [
            pages[: _pages(r.total_len, page_size) - _pages(r.prefix_len, page_size)]
            for pages, r in zip(fresh, requests, strict=True)
        ]
        in_order = np.concatenate([plan.logical_pages, *fresh]).astype(np.int64)
        page_table = np.full(layout.logical_pages + 1, len(in_order), np.int32)
        page_table[in_order] = np.arange(len(in_order), dtype=np.int32)
        slots = _slots(plan.new_locs, page_table, page_size)
        writes = WritePlan.build(layout, plan.new_locs)
        writes = WritePlan(torch.from_numpy(slots)[writes.rows], writes.physical_locs)
        return cls(
            plan=plan.to(device),
            scratch_pages=len(in_order) + 1,
            page_table=to_device(torch.from_numpy(page_table), device),
            chunk_slots=to_device(torch.from_numpy(slots), device),
            writes=writes.to(device),
            page_size=page_size,
        )

    def slots_for(self, rows: int) -> torch.Tensor:
        """i64[rows]: the slots of the new tokens, and of the padding that may follow them."""
        padding = rows - len(self.chunk_slots)
        if padding <= 0:
            return self.chunk_slots
        last_page = (self.scratch_pages - 1) * self.page_size
        return torch.cat((self.chunk_slots, self.chunk_slots.new_full((padding,), last_page)))

    def pages_in_scratch(self, logical_pages: torch.Tensor) -> torch.Tensor:
        """The scratch pages of logical ones, any shape and integer type, which is kept."""
        table = self.page_table.to(logical_pages.dtype)
        return table[logical_pages.long()]

    def locs_in_scratch(self, logical_locs: torch.Tensor) -> torch.Tensor:
        """The scratch slots of logical locs, any shape and integer type, which is kept."""
        pages = self.pages_in_scratch(logical_locs // self.page_size)
        return pages * self.page_size + logical_locs % self.page_size


def _pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def _slots(
    locs: npt.NDArray[np.int64], page_table: npt.NDArray[np.int32], page_size: int
) -> npt.NDArray[np.int64]:
    return page_table[locs // page_size].astype(np.int64) * page_size + locs % page_size

"""Which pages one batch reads, from whom, and where each of its tokens is found afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalLocs, LogicalPages


@dataclass(frozen=True)
class BatchSpan:
    """One request's part of a batch: what it has in the pool, and what it computes now."""

    logical_pages: LogicalPages
    """Its pages by position, enough for the prefix and the new tokens."""
    prefix_len: int
    new_len: int


@dataclass(frozen=True)
class ReadPlan:
    """The reads of one batch. Every rank of the group builds the same plan.

    Slots (page * page_size + offset) address one page-formatted source per kind. On a sharded
    pool the source is scratch: the unique prefix pages, owner after owner, then the chunk, which
    is the batch's new tokens in batch order. In place, where each rank stores every page, the
    source is the rank's own pool and nothing is copied.
    """

    in_place: bool
    logical_pages: LogicalPages
    """The pages to copy, each once, in scratch order."""
    physical_pages: torch.Tensor
    """i64, beside them: where each lies in its owner's pool."""
    owner_starts: tuple[int, ...]
    """N + 1 bounds: owner r's pages go to scratch pages owner_starts[r] to owner_starts[r + 1]."""
    scratch_pages: int
    """Pages to copy and pages for the chunk."""
    new_locs: LogicalLocs
    """i64[T]: where the pool stores the new tokens."""
    chunk_slots: torch.Tensor
    """i64[T]: where they are read."""
    request_slots: tuple[torch.Tensor, ...]
    """For each request i64[prefix_len + new_len]: where each of its tokens is read."""

    @classmethod
    def build(cls, layout: CpSharedKVLayout, requests: Sequence[BatchSpan]) -> ReadPlan:
        """Plan a batch; any rank's layout gives the same. LayoutError if it contradicts itself.

        A page that several prefixes share is copied once. A prefix may end inside a page that its
        new tokens go on filling: that page is copied whole, and its rows past the prefix, which
        its owner may be writing meanwhile, are never addressed.
        """
        _check(requests, layout.page_size)
        locs = [_locs(request, layout.page_size) for request in requests]
        new_locs = LogicalLocs(
            _joined([r_locs[r.prefix_len :] for r, r_locs in zip(requests, locs, strict=True)])
        )
        if layout.cp_size == 1:
            slots = [layout.logical_locs_to_physical(LogicalLocs(r_locs)) for r_locs in locs]
            chunk_slots = layout.logical_locs_to_physical(new_locs)
            pages, owner_starts, scratch_pages = LogicalPages(_joined([])), (0, 0), 0
        else:
            pages, owner_starts = _pages_by_owner(layout, requests)
            chunk_start = len(pages) * layout.page_size
            chunk_slots = np.arange(chunk_start, chunk_start + len(new_locs))
            scratch_pages = len(pages) + -(-len(new_locs) // layout.page_size)
            slots = _scratch_slots(layout.page_size, requests, pages, chunk_slots)
        return cls(
            in_place=layout.cp_size == 1,
            logical_pages=pages,
            physical_pages=torch.from_numpy(layout.logical_pages_to_physical(pages)),
            owner_starts=owner_starts,
            scratch_pages=scratch_pages,
            new_locs=new_locs,
            chunk_slots=torch.from_numpy(chunk_slots),
            request_slots=tuple(torch.from_numpy(r_slots) for r_slots in slots),
        )

    @property
    def busiest_owner_pages(self) -> int:
        """The most pages that any one rank owns of those to copy."""
        return max(self.owner_pages(rank) for rank in range(len(self.owner_starts) - 1))

    def owner_pages(self, rank: int) -> int:
        """How many of the pages to copy that rank owns."""
        return self.owner_starts[rank + 1] - self.owner_starts[rank]

    def owner_range(self, rank: int) -> slice:
        """That rank's pages, both in `physical_pages` and in scratch."""
        return slice(self.owner_starts[rank], self.owner_starts[rank + 1])


def _check(requests: Sequence[BatchSpan], page_size: int) -> None:
    for number, request in enumerate(requests):
        pages, total = request.logical_pages, request.prefix_len + request.new_len
        if request.prefix_len < 0 or request.new_len < 0:
            raise LayoutError(
                f"tokens of request {number} in the batch",
                value=f"{request.prefix_len} in the prefix, {request.new_len} new",
                allowed="0 or more of each",
            )
        if len(pages) * page_size < total:
            raise LayoutError(
                f"pages of request {number} in the batch",
                value=len(pages),
                allowed=f"{-(-total // page_size)} or more for {total} tokens",
            )
        if len(pages) and pages.min() < 1:
            raise LayoutError(
                f"page of request {number} in the batch",
                value=int(pages.min()),
                allowed="1 or more",
            )
    # A page that is written may be read in this batch by its writer alone: other readers would
    # find it half written, on some ranks and not on others.
    written = _joined([_written_pages(request, page_size) for request in requests])
    complete = _joined([r.logical_pages[: r.prefix_len // page_size] for r in requests])
    found, times = np.unique(np.append(written, np.unique(complete)), return_counts=True)
    if (times > 1).any():
        raise LayoutError(
            "page written twice, or read by another request while it is written, in one batch",
            value=int(found[times > 1][0]),
            allowed="one request for each page that is written",
        )


def _written_pages(request: BatchSpan, page_size: int) -> npt.NDArray[np.int64]:
    if request.new_len == 0:
        return request.logical_pages[:0]
    end = request.prefix_len + request.new_len
    return request.logical_pages[request.prefix_len // page_size : -(-end // page_size)]


def _locs(request: BatchSpan, page_size: int) -> npt.NDArray[np.int64]:
    """The logical loc of each token of the request, prefix and new."""
    return _slots_of_pages(request.logical_pages, page_size)[: request.prefix_len + request.new_len]


def _pages_by_owner(
    layout: CpSharedKVLayout, requests: Sequence[BatchSpan]
) -> tuple[LogicalPages, tuple[int, ...]]:
    """The unique prefix pages, owner after owner and ascending for each, and the owners' bounds."""
    prefixes = [r.logical_pages[: -(-r.prefix_len // layout.page_size)] for r in requests]
    pages = np.unique(_joined(prefixes))
    owners = layout.owner_for_logical_pages(LogicalPages(pages))
    by_owner = np.argsort(owners, kind="stable")
    starts = np.searchsorted(owners[by_owner], np.arange(layout.cp_size + 1))
    return LogicalPages(pages[by_owner]), tuple(starts.tolist())


def _scratch_slots(
    page_size: int,
    requests: Sequence[BatchSpan],
    pages: LogicalPages,
    chunk_slots: npt.NDArray[np.int64],
) -> list[npt.NDArray[np.int64]]:
    """For each request the scratch slot of each of its tokens; `pages` is in scratch order."""
    by_id = np.argsort(pages)
    slots: list[npt.NDArray[np.int64]] = []
    chunk_end = 0
    for request in requests:
        prefix_pages = request.logical_pages[: -(-request.prefix_len // page_size)]
        scratch_pages = by_id[np.searchsorted(pages, prefix_pages, sorter=by_id)]
        prefix_slots = _slots_of_pages(scratch_pages, page_size)[: request.prefix_len]
        chunk_start, chunk_end = chunk_end, chunk_end + request.new_len
        slots.append(np.concatenate((prefix_slots, chunk_slots[chunk_start:chunk_end])))
    return slots


def _slots_of_pages(pages: npt.NDArray[np.int64], page_size: int) -> npt.NDArray[np.int64]:
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate((np.empty(0, np.int64), *parts))

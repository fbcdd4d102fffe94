"""Which pages one batch reads, from whom, and where each of its tokens is found afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.errors import InvariantError, LayoutError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalLocs, LogicalPages
from cp_shared_kv.memory.device_copy import to_device


@dataclass(frozen=True)
class BatchSpan:
    """One request's part of a batch: what it has in the pool, and what it computes now."""

    logical_pages: LogicalPages
    """Its pages by position, enough for the prefix and the new tokens."""
    prefix_len: int
    new_len: int

    @property
    def total_len(self) -> int:
        return self.prefix_len + self.new_len


@dataclass(frozen=True)
class PagesByOwner:
    """Pages to copy into scratch, each once: owner after owner, ascending for each."""

    logical_pages: LogicalPages
    """In scratch order."""
    physical_pages: torch.Tensor
    """i64, beside them: where each lies in its owner's pool."""
    owner_starts: tuple[int, ...]
    """N + 1 bounds: owner r's pages go to scratch pages owner_starts[r] to owner_starts[r + 1]."""

    @classmethod
    def of(cls, layout: CpSharedKVLayout, logical_pages: npt.NDArray[np.int64]) -> PagesByOwner:
        """Of pages in any order, some maybe more than once."""
        pages = np.unique(logical_pages)
        owners = layout.owner_for_logical_pages(LogicalPages(pages))
        by_owner = np.argsort(owners, kind="stable")
        starts = np.searchsorted(owners[by_owner], np.arange(layout.cp_size + 1))
        in_order = LogicalPages(pages[by_owner])
        physical = torch.from_numpy(layout.logical_pages_to_physical(in_order))
        return cls(in_order, physical, tuple(starts.tolist()))

    def to(self, device: torch.device) -> Self:
        """With its tensors in that device's memory; the host does not wait."""
        return replace(self, physical_pages=to_device(self.physical_pages, device))

    @cached_property
    def _by_id(self) -> npt.NDArray[np.int64]:
        return np.argsort(self.logical_pages)

    def scratch_places(self, logical_pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """i64[n]: the scratch pages of some of these pages."""
        by_id = self._by_id
        return by_id[np.searchsorted(self.logical_pages, logical_pages, sorter=by_id)]

    @property
    def busiest_owner_pages(self) -> int:
        """The most pages that any one rank owns of those to copy."""
        return max(self.owner_pages(rank) for rank in range(len(self.owner_starts) - 1))

    @property
    def most_remote_pages(self) -> int:
        """The most of the pages to copy that any one rank has to get from others."""
        own = (self.owner_pages(rank) for rank in range(len(self.owner_starts) - 1))
        return len(self.logical_pages) - min(own)

    def owner_pages(self, rank: int) -> int:
        """How many of the pages to copy that rank owns."""
        return self.owner_starts[rank + 1] - self.owner_starts[rank]

    def owner_range(self, rank: int) -> slice:
        """That rank's pages, both in `physical_pages` and in scratch."""
        return slice(self.owner_starts[rank], self.owner_starts[rank + 1])


@dataclass(frozen=True)
class ReadPlan(PagesByOwner):
    """The reads of one batch. Every rank of the group builds the same plan.

    Slots (page * page_size + offset) address one page-formatted source per kind. On a sharded
    pool the source is scratch: the unique prefix pages, owner after owner, then the chunk, which
    is the batch's new tokens in batch order. In place, where each rank stores every page, the
    source is the rank's own pool and nothing is copied.
    """

    in_place: bool
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
        page_size = layout.page_size
        _check(requests, layout)
        new_locs = LogicalLocs(
            _joined(
                [
                    token_slots(r.logical_pages, r.prefix_len, r.total_len, page_size)
                    for r in requests
                ]
            )
        )
        in_place = layout.cp_size == 1
        prefixes = [] if in_place else [prefix_pages(r, page_size) for r in requests]
        pages = PagesByOwner.of(layout, _joined(prefixes))
        prefix_slots = len(pages.logical_pages) * page_size
        if in_place:
            chunk_slots = layout.logical_locs_to_physical(new_locs)
            places = [layout.logical_pages_to_physical(r.logical_pages) for r in requests]
            slots = [
                token_slots(its_places, 0, r.total_len, page_size)
                for r, its_places in zip(requests, places, strict=True)
            ]
        else:
            chunk_slots = prefix_slots + np.arange(len(new_locs))
            slots = _scratch_slots(page_size, requests, pages, chunk_slots)
        return cls(
            logical_pages=pages.logical_pages,
            physical_pages=pages.physical_pages,
            owner_starts=pages.owner_starts,
            in_place=in_place,
            scratch_pages=0
            if in_place
            else len(pages.logical_pages) + -(-len(new_locs) // page_size),
            new_locs=new_locs,
            chunk_slots=torch.from_numpy(chunk_slots),
            request_slots=tuple(torch.from_numpy(r_slots) for r_slots in slots),
        )

    def is_whole(self, pages: PagesByOwner) -> bool:
        """Whether these are all pages of the plan, maybe in another device's memory."""
        return pages.logical_pages is self.logical_pages

    def check_is_whole(self, pages: PagesByOwner) -> None:
        """For a reader that cannot copy a part of a plan: InvariantError for other pages."""
        if not self.is_whole(pages):
            raise InvariantError(
                "pages to read at once",
                value=f"{len(pages.logical_pages)} pages",
                allowed=f"the {len(self.logical_pages)} pages of the plan that the reader began",
            )

    def to(self, device: torch.device) -> Self:
        """The plan with its tensors in that device's memory; the host does not wait."""
        return replace(
            self,
            physical_pages=to_device(self.physical_pages, device),
            chunk_slots=to_device(self.chunk_slots, device),
            request_slots=tuple(to_device(slots, device) for slots in self.request_slots),
        )


def _check(requests: Sequence[BatchSpan], layout: CpSharedKVLayout) -> None:
    page_size = layout.page_size
    last_page = None if layout.physical_pages is None else layout.logical_pages
    read_only: list[npt.NDArray[np.int64]] = []
    written: list[npt.NDArray[np.int64]] = []
    for number, request in enumerate(requests):
        pages, pages_needed = request.logical_pages, -(-request.total_len // page_size)
        if request.prefix_len < 0 or request.new_len < 0:
            raise LayoutError(
                f"tokens of request {number} in the batch",
                value=f"{request.prefix_len} in the prefix, {request.new_len} new",
                allowed="0 or more of each",
            )
        if len(pages) < pages_needed:
            raise LayoutError(
                f"pages of request {number} in the batch",
                value=len(pages),
                allowed=f"{pages_needed} or more for {request.total_len} tokens",
            )
        pages = pages[:pages_needed]
        outside = pages < 1 if last_page is None else (pages < 1) | (pages > last_page)
        if outside.any():
            raise LayoutError(
                f"page of request {number} in the batch",
                value=int(pages[outside][0]),
                allowed="1 or more" if last_page is None else f"1..{last_page}",
            )
        first_written = request.prefix_len // page_size if request.new_len else pages_needed
        read_only.append(pages[:first_written])
        written.append(pages[first_written:])
    # Only its writer may read a page that is written: others would find it half written, and on
    # some ranks more of it than on others.
    used = np.append(_joined(written), np.unique(_joined(read_only)))
    found, times = np.unique(used, return_counts=True)
    if (times > 1).any():
        raise LayoutError(
            "page that is written in this batch and used a second time",
            value=int(found[times > 1][0]),
            change="share complete pages only, and not before the batch that computes them is done",
        )


def prefix_pages(request: BatchSpan, page_size: int) -> LogicalPages:
    """The request's pages that hold any of its prefix."""
    return LogicalPages(request.logical_pages[: -(-request.prefix_len // page_size)])


def _scratch_slots(
    page_size: int,
    requests: Sequence[BatchSpan],
    pages: PagesByOwner,
    chunk_slots: npt.NDArray[np.int64],
) -> list[npt.NDArray[np.int64]]:
    """For each request the scratch slot of each of its tokens."""
    slots: list[npt.NDArray[np.int64]] = []
    chunk_end = 0
    for request in requests:
        places = pages.scratch_places(prefix_pages(request, page_size))
        prefix_slots = token_slots(places, 0, request.prefix_len, page_size)
        chunk_start, chunk_end = chunk_end, chunk_end + request.new_len
        slots.append(np.concatenate((prefix_slots, chunk_slots[chunk_start:chunk_end])))
    return slots


def token_slots(
    pages: npt.NDArray[np.int64], start: int, stop: int, page_size: int
) -> npt.NDArray[np.int64]:
    """The slots of tokens start..stop-1 of a request with these pages."""
    first = start // page_size
    slots = pages[first : -(-stop // page_size), None] * page_size + np.arange(page_size)
    return slots.reshape(-1)[start - first * page_size : stop - first * page_size]


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate((np.empty(0, np.int64), *parts))

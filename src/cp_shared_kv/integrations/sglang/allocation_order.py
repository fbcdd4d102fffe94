"""Which free pages a batch takes, as tensors on the device that holds the free list.

An allocator of SGLang's hands out the first pages of its list. So preference is a matter of order:
the pages wanted next are brought to its front, and the host never has to know them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def owners_of(pages: torch.Tensor, cp_size: int) -> torch.Tensor:
    """The owner of each logical page i64[*], pages 1 and up, in the page-interleaved layout."""
    return (pages - 1) % cp_size


def wanted_owners(
    free_pages: torch.Tensor,
    last_pages: torch.Tensor,
    has_pages: Sequence[bool],
    new_page_counts: Sequence[int],
    cp_size: int,
) -> torch.Tensor:
    """The owner that each new page of a batch should have: i64[sum of counts], request by request.

    A request that holds pages goes on after its last one, last_pages i64[requests]. New requests
    follow each other, the first from the owner with the most free pages. Owners take turns.
    """
    device = free_pages.device
    counts = torch.tensor(list(new_page_counts), dtype=torch.int64)
    before = counts.cumsum(0) - counts
    request = torch.repeat_interleave(torch.arange(len(counts)), counts)
    index_in_request = torch.arange(len(request)) - before[request]
    is_new = ~torch.tensor(list(has_pages), dtype=torch.bool)
    new_before = (counts * is_new).cumsum(0) - counts * is_new
    offset, is_new, request, index_in_request = (
        part.to(device, non_blocking=True)
        for part in (new_before, is_new, request, index_in_request)
    )
    free_per_owner = torch.zeros(cp_size, dtype=torch.int64, device=device)
    free_owners = owners_of(free_pages, cp_size)
    free_per_owner.scatter_add_(0, free_owners, torch.ones_like(free_owners))
    fullest = free_per_owner.argmax()
    first = torch.where(is_new, fullest + offset, owners_of(last_pages, cp_size) + 1)
    return (first[request] + index_in_request) % cp_size


def preferred_first(free_pages: torch.Tensor, wanted: torch.Tensor, cp_size: int) -> torch.Tensor:
    """The free pages, reordered: first one for each of `wanted`, of that owner as far as it goes.

    free_pages i64[F] and wanted i64[W], W <= F. Where an owner has run out, the pages that nobody
    asked for stand in, in their order. The rest keeps its order. Nothing waits for the device.
    """
    free_count, wanted_count = len(free_pages), len(wanted)
    owners = owners_of(free_pages, cp_size)
    by_owner = torch.argsort(owners, stable=True)
    everybody = torch.arange(cp_size, device=free_pages.device)
    starts = torch.searchsorted(owners[by_owner], torch.cat((everybody, everybody[-1:] + 1)))
    wanted_order = torch.argsort(wanted, stable=True)
    wanted_starts = torch.searchsorted(wanted[wanted_order], everybody)
    turn = torch.empty_like(wanted)
    turn[wanted_order] = (
        torch.arange(wanted_count, device=wanted.device) - wanted_starts[wanted[wanted_order]]
    )
    place = starts[wanted] + turn
    served = place < starts[wanted + 1]
    index = by_owner[torch.where(served, place, 0)]
    taken = _marked(torch.where(served, index, free_count), free_count)
    spare = torch.argsort(taken.to(torch.int8), stable=True)
    stand_in = spare[torch.cumsum(~served, 0).sub(1).clamp_(min=0)]
    chosen = torch.where(served, index, stand_in)
    rest = torch.argsort(_marked(chosen, free_count).to(torch.int8), stable=True)
    order = torch.cat((chosen, rest[: free_count - wanted_count]))
    return free_pages[order]


def _marked(indices: torch.Tensor, length: int) -> torch.Tensor:
    """bool[length], true at the indices; an index of `length` marks nothing."""
    marks = torch.zeros(length + 1, dtype=torch.bool, device=indices.device)
    marks[indices] = True
    return marks[:length]

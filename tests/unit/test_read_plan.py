"""The read plan: unique pages by owner, and a slot for every token of every request."""

from __future__ import annotations

import numpy as np
import pytest

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan

PAGE_SIZE = 4


def span(pages: list[int], prefix_len: int, new_len: int) -> BatchSpan:
    return BatchSpan(LogicalPages(np.array(pages, np.int64)), prefix_len, new_len)


def build(cp_size: int, *requests: BatchSpan, cp_rank: int = 0, stripe_pages: int = 1) -> ReadPlan:
    layout = CpSharedKVLayout(PAGE_SIZE, cp_size, cp_rank, stripe_pages, physical_pages=8)
    return ReadPlan.build(layout, requests)


def test_pages_lie_owner_after_owner_and_slots_follow_them() -> None:
    # N = 2: pages 1, 3, 5 belong to rank 0 as its pages 1, 2, 3; 2 and 8 to rank 1 as 1 and 4.
    plan = build(2, span([8, 5, 2, 1, 3], prefix_len=20, new_len=0))
    assert plan.logical_pages.tolist() == [1, 3, 5, 2, 8]
    assert plan.physical_pages.tolist() == [1, 2, 3, 1, 4]
    assert plan.owner_starts == (0, 3, 5)
    assert (plan.owner_pages(0), plan.owner_pages(1), plan.busiest_owner_pages) == (3, 2, 3)
    (slots,) = plan.request_slots
    assert (slots.view(5, 4)[:, 0] // PAGE_SIZE).tolist() == [4, 2, 3, 0, 1]
    assert (slots % PAGE_SIZE).tolist() == [0, 1, 2, 3] * 5
    assert plan.scratch_pages == 5
    assert not plan.in_place


def test_page_that_two_prefixes_share_is_copied_once() -> None:
    plan = build(2, span([1, 2, 3], 8, 1), span([1, 2, 4], 8, 1), span([1, 5], 4, 1))
    assert plan.logical_pages.tolist() == [1, 2]
    first, second, third = (slots.tolist() for slots in plan.request_slots)
    assert first[:8] == second[:8] == [*range(8)]
    assert third[:4] == [*range(4)]
    assert [first[8], second[8], third[4]] == [8, 9, 10]


def test_boundary_page_is_copied_but_its_rows_past_the_prefix_are_not_addressed() -> None:
    plan = build(2, span([3, 6], prefix_len=6, new_len=2))
    assert plan.logical_pages.tolist() == [3, 6]
    assert plan.request_slots[0].tolist() == [0, 1, 2, 3, 4, 5, 8, 9]
    assert plan.new_locs.tolist() == [6 * 4 + 2, 6 * 4 + 3]
    assert plan.scratch_pages == 3


def test_new_tokens_follow_the_prefix_pages_in_batch_order() -> None:
    plan = build(2, span([7, 1], 4, 3), span([2, 4], 0, 6), span([3], 4, 0))
    assert plan.new_locs.tolist() == [4, 5, 6, 8, 9, 10, 11, 16, 17]
    assert plan.chunk_slots.tolist() == [*range(8, 17)]
    slots = [slots.tolist() for slots in plan.request_slots]
    # Scratch has pages 3 and 7, both of rank 0, in front of the chunk.
    assert slots == [[4, 5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16], [0, 1, 2, 3]]
    assert plan.scratch_pages == 2 + 3


def test_batch_without_prefixes_copies_no_page() -> None:
    plan = build(4, span([5], 0, 3), span([6], 0, 1))
    assert plan.owner_starts == (0, 0, 0, 0, 0)
    assert plan.busiest_owner_pages == 0
    assert plan.scratch_pages == 1
    assert [slots.tolist() for slots in plan.request_slots] == [[0, 1, 2], [3]]


def test_owners_without_pages_have_empty_ranges() -> None:
    plan = build(4, span([3, 7], 8, 0))
    assert plan.owner_starts == (0, 0, 0, 2, 2)
    assert [plan.owner_pages(rank) for rank in range(4)] == [0, 0, 2, 0]
    assert plan.owner_range(2) == slice(0, 2)


def test_batch_of_nothing_at_all() -> None:
    for cp_size in (1, 3):
        plan = build(cp_size)
        assert (plan.scratch_pages, len(plan.new_locs), plan.request_slots) == (0, 0, ())


def test_every_rank_builds_the_same_plan() -> None:
    requests = [span([9, 2, 7, 3], 10, 5), span([1, 9, 6], 0, 9)]
    requests[1] = span([9, 1, 6], 4, 7)
    plans = [build(3, *requests, cp_rank=rank, stripe_pages=2) for rank in range(3)]
    for plan in plans[1:]:
        assert plan.logical_pages.tolist() == plans[0].logical_pages.tolist()
        assert plan.physical_pages.tolist() == plans[0].physical_pages.tolist()
        assert plan.owner_starts == plans[0].owner_starts
        assert [s.tolist() for s in plan.request_slots] == [
            s.tolist() for s in plans[0].request_slots
        ]


def test_one_rank_reads_in_place() -> None:
    plan = build(1, span([5, 2], prefix_len=5, new_len=2), span([7], 0, 1))
    assert plan.in_place
    assert (plan.scratch_pages, len(plan.logical_pages)) == (0, 0)
    assert plan.request_slots[0].tolist() == [20, 21, 22, 23, 8, 9, 10]
    assert plan.request_slots[1].tolist() == [28]
    assert plan.chunk_slots.tolist() == plan.new_locs.tolist() == [9, 10, 28]


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([([1], -1, 2)], "-1 in the prefix, 2 new"),
        ([([1], 2, -1)], "2 in the prefix, -1 new"),
        ([([1], 4, 1)], "pages of request 0 in the batch: 1; allowed: 2 or more for 5 tokens"),
        ([([1], 0, 1), ([2, 0], 4, 1)], "page of request 1 in the batch: 0"),
        ([([1], 0, 1), ([-3], 0, 1)], "page of request 1 in the batch: -3"),
        ([([17], 0, 1)], r"page of request 0 in the batch: 17; allowed: 1\.\.16"),
        ([([17], 4, 0)], r"page of request 0 in the batch: 17; allowed: 1\.\.16"),
        ([([3], 0, 1), ([3], 1, 1)], "used a second time: 3"),
        ([([1, 3], 4, 1), ([3, 5], 4, 1)], "used a second time: 3"),
        ([([1, 3], 5, 1), ([1, 3], 8, 0)], "used a second time: 3"),
        ([([1, 1], 0, 8)], "used a second time: 1"),
    ],
)
def test_batch_that_contradicts_itself_is_refused(
    cp_size: int, requests: list[tuple[list[int], int, int]], message: str
) -> None:
    layout = CpSharedKVLayout(PAGE_SIZE, cp_size, 0, physical_pages=16 // cp_size)
    with pytest.raises(LayoutError, match=message):
        ReadPlan.build(layout, [span(*request) for request in requests])


def test_pages_kept_for_later_tokens_do_not_matter_yet() -> None:
    plan = build(2, span([1, 2, 9, 9], 4, 1), span([4, 9], 0, 2))
    assert plan.logical_pages.tolist() == [1]


def test_slots_and_locs_are_int64_where_32_bits_would_wrap() -> None:
    layout = CpSharedKVLayout(64, 8, 0)
    page = 1 << 40
    plan = ReadPlan.build(layout, [span([page, page + 1], 64, 3)])
    assert plan.new_locs.tolist() == [(page + 1) * 64 + offset for offset in range(3)]
    assert plan.physical_pages.tolist() == [(page - 1) // 8 + 1]
    in_place = ReadPlan.build(CpSharedKVLayout(64, 1, 0), [span([page, page + 1], 64, 3)])
    assert in_place.request_slots[0].tolist()[-1] == (page + 1) * 64 + 2

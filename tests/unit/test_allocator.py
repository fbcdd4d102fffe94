"""Free pages: all of them serve, and which are taken keeps the owners level."""

from __future__ import annotations

import numpy as np
import pytest

from cp_shared_kv.errors import CapacityError, InvariantError, LayoutError
from cp_shared_kv.layout import CpSharedKVLayout, KVCapacity
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.allocator import PageAllocator, interleave_stripes, level_quotas


def pages(*ids: int) -> LogicalPages:
    return LogicalPages(np.array(ids, np.int64))


def allocator(physical_pages: int, cp_size: int, stripe_pages: int = 1) -> PageAllocator:
    return PageAllocator(KVCapacity(physical_pages, 64, cp_size, stripe_pages))


def owners(drawn: LogicalPages, cp_size: int, stripe_pages: int = 1) -> list[int]:
    layout = CpSharedKVLayout(64, cp_size, 0, stripe_pages)
    return layout.owner_for_logical_pages(drawn).tolist()


class TestDraw:
    def test_an_empty_pool_is_drawn_in_ascending_order(self) -> None:
        for stripe_pages in (1, 2):
            drawn = allocator(4, 3, stripe_pages).draw(12)
            assert drawn.dtype == np.int64
            assert drawn.tolist() == list(range(1, 13))

    def test_a_request_goes_on_with_the_owner_after_its_last_page(self) -> None:
        free = allocator(8, 4)
        first = free.draw(6)
        free.draw(3)  # pages 7, 8, 9 belong to somebody else
        assert owners(first, 4) == [0, 1, 2, 3, 0, 1]
        assert free.draw(4, first).tolist() == [11, 12, 13, 10]
        assert owners(pages(11, 12, 13, 10), 4) == [2, 3, 0, 1]

    def test_a_begun_stripe_is_filled_before_the_next_owner(self) -> None:
        free = allocator(8, 2, stripe_pages=4)
        first = free.draw(6)
        assert free.draw(5, first).tolist() == [7, 8, 9, 10, 11]

    def test_a_request_starts_at_the_owner_with_the_most_free_pages(self) -> None:
        free = allocator(4, 3)
        held = free.draw(4)
        assert owners(held, 3) == [0, 1, 2, 0]
        assert owners(free.draw(3), 3) == [1, 2, 0]
        free.free(held[3:])
        free.free(held[:1])
        assert owners(free.draw(1), 3) == [0]

    def test_ties_go_round_from_the_owner_of_the_requests_first_page(self) -> None:
        free = allocator(4, 3)
        free.draw(2)
        request = free.draw(2)
        assert owners(request, 3) == [2, 0]
        assert owners(free.draw(5, request), 3) == [1, 2, 0, 1, 2]

    def test_what_an_earlier_draw_left_uneven_the_next_one_makes_up_for(self) -> None:
        free = allocator(4, 2)
        everything = free.draw(8)
        of_owner_0, of_owner_1 = everything[::2], everything[1::2]
        free.free(of_owner_0[:2])
        request = free.draw(2)  # no choice
        assert owners(request, 2) == [0, 0]
        free.free(of_owner_0[2:])
        free.free(of_owner_1[:2])
        assert owners(free.draw(3, request), 2) == [1, 1, 0]

    def test_pages_after_the_requests_last_of_an_owner_come_before_lower_ones(self) -> None:
        free = allocator(6, 2)
        everything = free.draw(12)
        free.free(everything[:2])
        free.free(everything[6:])
        assert free.draw(3, pages(5, 6)).tolist() == [7, 8, 9]

    def test_every_free_page_serves_whoever_owns_it(self) -> None:
        free = allocator(5, 4)
        everything = free.draw(20)
        free.free(everything[::4])
        assert sorted(free.draw(5, everything[1:3])) == [1, 5, 9, 13, 17]
        assert free.available_pages == 0

    def test_more_than_is_free_is_refused_and_nothing_is_drawn(self) -> None:
        free = allocator(4, 2)
        free.draw(3)
        with pytest.raises(CapacityError, match=r"6; allowed: at most 5"):
            free.draw(6)
        assert free.available_pages == 5
        free.check_invariants()

    def test_no_pages_can_be_drawn_from_an_empty_free_list(self) -> None:
        free = allocator(2, 2)
        free.draw(4)
        assert free.draw(0).tolist() == []

    @pytest.mark.parametrize("request_pages", [pages(0), pages(9), pages(-1)])
    def test_a_request_of_foreign_pages_is_refused(self, request_pages: LogicalPages) -> None:
        free = allocator(4, 2)
        with pytest.raises(LayoutError):
            free.draw(1, request_pages)
        assert free.available_pages == 8

    def test_long_requests_lie_level_in_a_pool_that_churns(self) -> None:
        # Half of the pool free, in pages picked at random: the worst order that churn can leave.
        free = allocator(512, 8)
        everything = free.draw(4096)
        free.free(LogicalPages(np.random.default_rng(0).permutation(everything)[:2048]))
        request = free.draw(100)
        while len(request) < 1600:
            request = LogicalPages(np.concatenate([request, free.draw(13, request)]))
        counts = np.bincount(owners(request, 8), minlength=8)
        assert counts.max() - counts.min() <= 1


class TestFree:
    def test_pages_come_back_in_any_order(self) -> None:
        free = allocator(4, 3)
        drawn = free.draw(12)
        free.free(pages(7, 2, 12))
        assert free.free_pages().tolist() == [2, 7, 12]
        assert free.free_pages_per_owner().tolist() == [1, 1, 1]
        free.free(LogicalPages(np.setdiff1d(drawn, [2, 7, 12])))
        assert free.available_pages == 12

    @pytest.mark.parametrize(
        ("freed", "error", "named"),
        [
            (pages(3, 8), InvariantError, "8 .it is free already"),
            (pages(2, 5, 3, 5), InvariantError, "5 .it is twice in one call"),
            (pages(3, 0), LayoutError, "padding page 0"),
            (pages(3, 17), LayoutError, "17 at index 1"),
            (pages(-1, 3), LayoutError, "-1 at index 0"),
            (LogicalPages(np.ones((1, 1), np.int64)), LayoutError, "one-dimensional"),
            (LogicalPages(np.ones(1, np.float64)), LayoutError, "float64"),  # pyright: ignore
        ],
    )
    def test_a_wrong_page_is_named_and_nothing_is_freed(
        self, freed: LogicalPages, error: type[Exception], named: str
    ) -> None:
        free = allocator(8, 2)
        free.draw(7)
        before = free.free_pages().tolist()
        with pytest.raises(error, match=named):
            free.free(freed)
        assert free.free_pages().tolist() == before
        free.check_invariants()


def test_a_miscounted_owner_is_found() -> None:
    free = allocator(4, 2)
    free._free_count[1] -= 1
    with pytest.raises(InvariantError, match="miscounted"):
        free.check_invariants()


def deal_one_by_one(page_count: int, held: list[int], free: list[int], stripe: int) -> list[int]:
    """The policy as a sentence: the next page goes to the owner with the fewest stripes."""
    held, free, turns = list(held), list(free), []
    for _ in range(page_count):
        turn = min(
            (turn for turn in range(len(held)) if free[turn]), key=lambda t: (held[t] // stripe, t)
        )
        held[turn] += 1
        free[turn] -= 1
        turns.append(turn)
    return turns


def test_quotas_and_order_equal_dealing_the_pages_one_by_one() -> None:
    rng = np.random.default_rng(1)
    for _ in range(400):
        ranks, stripe = int(rng.integers(1, 9)), int(rng.integers(1, 5))
        held, free = rng.integers(0, 30, ranks), rng.integers(0, 20, ranks)
        page_count = int(rng.integers(0, free.sum() + 1))
        turns = deal_one_by_one(page_count, held.tolist(), free.tolist(), stripe)

        quotas = level_quotas(page_count, held, free, stripe)
        assert quotas.tolist() == np.bincount(turns, minlength=ranks).tolist()[:ranks]
        if page_count:
            slots = [100 * turn + np.arange(quota) for turn, quota in enumerate(quotas)]
            assert (interleave_stripes(slots, held, stripe) // 100).tolist() == turns

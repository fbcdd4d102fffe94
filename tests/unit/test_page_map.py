"""Pages by owner, range and state: where each page is counted, and how ranges are cut."""

from __future__ import annotations

import numpy as np
import pytest

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.layout import CpSharedKVLayout, KVCapacity
from cp_shared_kv.memory.logical_pool import LogicalPool

PAGE_SIZE = 4


def make_pool(physical_pages: int = 8, cp_size: int = 2, stripe_pages: int = 1) -> LogicalPool:
    return LogicalPool(KVCapacity(physical_pages, PAGE_SIZE, cp_size, stripe_pages))


def test_an_empty_pool_is_free_in_every_range() -> None:
    pages = make_pool(physical_pages=7).page_map(3)
    assert (pages.physical_pages, pages.pages_per_bin) == (7, 3)
    assert pages.free.tolist() == [[3, 3, 1], [3, 3, 1]]
    assert pages.cached.sum() == pages.locked.sum() == 0


@pytest.mark.parametrize(
    ("most_bins", "sizes"),
    [(1, [7]), (2, [4, 3]), (4, [2, 2, 2, 1]), (6, [2, 2, 2, 1]), (7, [1] * 7), (100, [1] * 7)],
)
def test_ranges_are_equal_but_for_the_last_and_never_more_than_asked_for(
    most_bins: int, sizes: list[int]
) -> None:
    pages = make_pool(physical_pages=7).page_map(most_bins)
    assert pages.free.tolist() == [sizes, sizes]


@pytest.mark.parametrize("stripe_pages", [1, 2])
def test_each_page_is_counted_at_its_owner_and_physical_page(stripe_pages: int) -> None:
    pool = make_pool(physical_pages=8, cp_size=2, stripe_pages=stripe_pages)
    keys = np.arange(5)
    cached = pool.admit(1, keys, 5)
    assert cached is not None
    pool.publish(1, keys)
    pool.release(1)
    held = pool.admit(2, keys[:0] + 90, 3)
    assert held is not None
    layout = CpSharedKVLayout(PAGE_SIZE, 2, 0, stripe_pages, 8)

    def places(logical_pages: np.ndarray) -> list[list[int]]:
        counts = np.zeros((2, 8), np.int64)
        owners = layout.owner_for_logical_pages(logical_pages)
        counts[owners, layout.logical_pages_to_physical(logical_pages) - 1] += 1
        return counts.tolist()

    pages = pool.page_map(8)
    assert pages.cached.tolist() == places(cached.logical_pages)
    assert pages.locked.tolist() == places(held.logical_pages)
    assert (pages.free + pages.cached + pages.locked == 1).all()


def test_a_cached_prefix_that_a_room_uses_is_in_use() -> None:
    pool = make_pool()
    keys = np.arange(4)
    pool.admit(1, keys, 4)
    pool.publish(1, keys)
    pool.release(1)
    assert pool.page_map(1).cached.sum() == 4
    pool.admit(2, keys[:3], 3)
    pages = pool.page_map(1)
    assert (pages.cached.sum(), pages.locked.sum()) == (1, 3)
    pool.release(2)
    pool.clear()
    assert pool.page_map(1).free.tolist() == [[8], [8]]


def test_counting_changes_nothing() -> None:
    pool = make_pool()
    pool.admit(1, np.arange(3), 3)
    before = pool.page_map(4)
    before.free[:] = -1
    again = pool.page_map(4)
    assert again.free.min() >= 0
    assert pool.available_pages == again.free.sum()
    pool.check_invariants()


@pytest.mark.parametrize("most_bins", [0, -3])
def test_fewer_than_one_range_is_refused(most_bins: int) -> None:
    with pytest.raises(LayoutError, match="most_bins"):
        make_pool().page_map(most_bins)

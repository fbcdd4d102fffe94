"""What the pool refuses, named and with nothing changed, and the damage that its books show."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cp_shared_kv.errors import CapacityError, CpkvError, InvariantError, LayoutError
from cp_shared_kv.layout import KVCapacity
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.logical_pool import LogicalPool

from .small_pools import keys, make_pool, run, state


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda pool: pool.admit(9, keys(), 17), CapacityError, "17 pages.*at most 16 pages"),
        (lambda pool: pool.extend(1, 14), CapacityError, "18 pages.*at most 16 pages"),
        (lambda pool: pool.fork(1, 9, keys(), 17), CapacityError, "17 pages.*at most 16 pages"),
        (lambda pool: pool.admit(9, keys(), -1), LayoutError, "-1"),
        (lambda pool: pool.extend(1, -1), LayoutError, "-1"),
        (lambda pool: pool.admit(9, keys(1, 2, 3), 2), LayoutError, "3; allowed: <= 2"),
        (lambda pool: pool.publish(1, keys(0, 1, 2, 3, 4)), LayoutError, "5; allowed: <= 4"),
        (lambda pool: pool.publish(1, keys(0, 7)), LayoutError, "differ from those of room 1"),
        (lambda pool: pool.publish(1, np.int32([0, 1])), LayoutError, "differ"),
        (lambda pool: pool.publish(1, np.zeros((1, 1))), LayoutError, "wrong form"),
        (lambda pool: pool.match(np.array([None])), LayoutError, "wrong form"),
        (lambda pool: pool.admit(1, keys(), 1), InvariantError, "open already: 1"),
        (lambda pool: pool.fork(1, 1, keys(), 1), InvariantError, "open already: 1"),
        (lambda pool: pool.fork(9, 8, keys(), 1), InvariantError, "not open: 9"),
        (lambda pool: pool.release(9), InvariantError, "not open: 9"),
        (lambda pool: pool.extend(9, 1), InvariantError, "not open: 9"),
        (lambda pool: pool.publish(9, keys()), InvariantError, "not open: 9"),
        (lambda pool: pool.pages(9), InvariantError, "not open: 9"),
        (lambda pool: pool.advance(1, 9), LayoutError, r"8\.\.17; allowed: within 0\.\.16"),
        (lambda pool: pool.logical_locs(1, 0, 9), LayoutError, r"allowed: within 0\.\.8"),
    ],
)
def test_a_call_that_makes_no_sense_is_named_and_changes_nothing(
    call: Callable[[LogicalPool], object], error: type[CpkvError], named: str
) -> None:
    pool = make_pool()
    run(pool, 0, np.arange(0, 2))
    pool.admit(1, np.arange(0, 3), 4)  # 2 pages cached
    before = state(pool)
    with pytest.raises(error, match=named):
        call(pool)
    assert state(pool) == before


def test_a_room_is_released_once() -> None:
    pool = make_pool()
    pool.admit(1, keys(1), 2)
    pool.release(1)
    with pytest.raises(InvariantError, match="not open: 1"):
        pool.release(1)
    assert pool.available_pages == 16


def lose_a_page(pool: LogicalPool) -> None:
    pool._cache.evict(1)


def draw_behind_its_back(pool: LogicalPool) -> None:
    pool._allocator.draw(1)


def lock_behind_its_back(pool: LogicalPool) -> None:
    pool._cache.lock(pool._cache.match(pool._keys(np.arange(4))))


def swap_a_shared_page(pool: LogicalPool) -> None:
    row = pool._requests._rows[1]
    row.logical_pages = row.logical_pages[[1, 0, 2, 3, 4]]


def forget_a_room(pool: LogicalPool) -> None:
    del pool._rooms[1]


def publish_less(pool: LogicalPool) -> None:
    pool._rooms[1].published = pool._rooms[1].published[:1]


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_page,
        draw_behind_its_back,
        lock_behind_its_back,
        swap_a_shared_page,
        forget_a_room,
        publish_less,
    ],
)
def test_each_kind_of_damage_breaks_an_invariant(damage: Callable[[LogicalPool], None]) -> None:
    pool = make_pool()
    run(pool, 0, np.arange(4))
    pool.admit(1, np.arange(2), 5)
    pool.check_invariants()
    damage(pool)
    with pytest.raises(InvariantError, match="logical pool: "):
        pool.check_invariants()


def test_an_order_that_names_other_pages_is_refused() -> None:
    pool = LogicalPool(KVCapacity(physical_pages=16, page_size=4, cp_size=1))
    with pytest.raises(InvariantError, match="arranged"):
        pool.admit(1, np.arange(2), 3, arrange=lambda drawn, _: LogicalPages(drawn + 1))
    assert pool.available_pages == 16
    pool.check_invariants()


@pytest.mark.parametrize("page_count", [6.0, "6", True])
def test_a_count_that_is_no_whole_number_is_refused_and_nothing_changes(page_count: object) -> None:
    pool = LogicalPool(KVCapacity(physical_pages=16, page_size=4, cp_size=1))
    with pytest.raises(LayoutError):
        pool.admit(1, np.arange(2), page_count)  # type: ignore[arg-type]
    assert pool.available_pages == 16
    pool.check_invariants()

"""The pool's pages: admitted, extended, evicted, released, and none of them lost."""

from __future__ import annotations

import numpy as np

from cp_shared_kv.layout import KVCapacity
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.logical_pool import LogicalPool

from .small_pools import PAGE_SIZE, admitted, keys, make_pool, run, state


def test_an_empty_pool_is_all_available() -> None:
    pool = make_pool(physical_pages=6, cp_size=3, stripe_pages=2)
    assert (pool.total_pages, pool.page_size) == (18, PAGE_SIZE)
    assert (pool.available_pages, pool.cached_pages, pool.locked_pages) == (18, 0, 0)
    assert pool.free_pages_per_owner().tolist() == [6, 6, 6]


def test_pages_go_from_available_to_locked_to_cached_and_back() -> None:
    pool = make_pool()
    admission = admitted(pool.admit(1, keys(1, 2, 3), 5))
    assert admission.cached_pages == 0
    assert admission.logical_pages.tolist() == [1, 2, 3, 4, 5]
    assert (pool.available_pages, pool.cached_pages, pool.locked_pages) == (11, 0, 5)
    pool.publish(1, keys(1, 2, 3))
    assert (pool.available_pages, pool.cached_pages, pool.locked_pages) == (11, 0, 5)
    pool.release(1)
    assert (pool.available_pages, pool.cached_pages, pool.locked_pages) == (13, 3, 0)
    assert pool.clear() == 3
    assert pool.evicted_pages_total == 0
    assert (pool.available_pages, pool.cached_pages, pool.locked_pages) == (16, 0, 0)
    pool.check_invariants()


def test_an_extended_room_goes_on_in_owner_order() -> None:
    pool = make_pool(cp_size=4)
    pool.admit(1, keys(), 2)
    more = pool.extend(1, 3)
    assert more is not None
    assert ((pool.pages(1) - 1) % 4).tolist() == [0, 1, 2, 3, 0]
    assert pool.pages(1)[2:].tolist() == more.tolist()


def test_admission_beside_locked_pages_returns_none_until_some_are_released() -> None:
    pool = make_pool()
    run(pool, 1, np.arange(0, 6))
    pool.admit(2, np.arange(10, 20), 10)
    before = state(pool)
    assert pool.admit(3, np.arange(20, 27), 7) is None
    assert state(pool) == before  # the six cached pages were not evicted in vain
    pool.release(2)
    assert pool.admit(3, np.arange(20, 27), 7) is not None


def test_extension_beside_locked_pages_returns_none() -> None:
    pool = make_pool()
    pool.admit(1, keys(), 10)
    pool.admit(2, keys(), 6)
    before = state(pool)
    assert pool.extend(1, 1) is None
    assert state(pool) == before
    pool.release(2)
    assert pool.extend(1, 6) is not None


def test_evict_returns_and_counts_the_pages_that_came_free() -> None:
    pool = make_pool()
    run(pool, 1, keys(1, 2, 3, 4))
    assert pool.evict(3) == 3
    assert pool.evict(3) == 1
    assert pool.evict(3) == 0
    assert pool.evicted_pages_total == 4


def test_any_order_of_admissions_and_ends_returns_every_page() -> None:
    rng = np.random.default_rng(2)
    pool = make_pool(physical_pages=20, cp_size=3, stripe_pages=2)
    prompts = [np.concatenate([np.arange(cut), rng.integers(99, size=9)]) for cut in range(12)]
    for room in range(600):
        prompt = prompts[rng.integers(len(prompts))][: rng.integers(1, 12)]
        if pool.admit(room, prompt, len(prompt) + int(rng.integers(3))) is not None:
            pool.extend(room, int(rng.integers(2)))
            pool.publish(room, prompt[: rng.integers(len(prompt) + 1)])
        while len(pool.rooms) > rng.integers(6):
            pool.release(int(rng.choice(list(pool.rooms))))
        pool.check_invariants()
    for room in list(pool.rooms):
        pool.release(room)
    assert pool.available_pages + pool.cached_pages == pool.total_pages
    pool.clear()
    assert pool.available_pages == pool.total_pages


def test_drawn_pages_may_be_put_in_another_order_and_the_cached_prefix_stays() -> None:
    pool = LogicalPool(KVCapacity(physical_pages=16, page_size=4, cp_size=1))
    pool.admit(1, np.arange(2), 2)
    pool.publish(1, np.arange(2))
    seen: list[int] = []

    def backwards(drawn: LogicalPages, first_position: int) -> LogicalPages:
        seen.append(first_position)
        return LogicalPages(drawn[::-1])

    admission = pool.admit(2, np.arange(5), 6, arrange=backwards)
    assert admission is not None
    assert seen == [2]
    assert admission.logical_pages[:2].tolist() == pool.pages(1).tolist()
    drawn = admission.logical_pages[2:]
    assert drawn.tolist() == sorted(drawn.tolist(), reverse=True)
    pool.check_invariants()

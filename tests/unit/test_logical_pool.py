"""The pool as a scheduler uses it: admit, extend, publish, fork, release, evict."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cp_shared_kv.errors import CapacityError, CpkvError, InvariantError, LayoutError
from cp_shared_kv.layout import KVCapacity
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.logical_pool import Admission, LogicalPool
from cp_shared_kv.memory.page_keys import page_keys

PAGE_SIZE = 4


def make_pool(
    physical_pages: int = 8, cp_size: int = 2, stripe_pages: int = 1, *, prefix_caching: bool = True
) -> LogicalPool:
    capacity = KVCapacity(physical_pages, PAGE_SIZE, cp_size, stripe_pages)
    return LogicalPool(capacity, prefix_caching=prefix_caching)


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def admitted(admission: Admission | None) -> Admission:
    assert admission is not None
    return admission


def run(pool: LogicalPool, room: int, page_keys: np.ndarray) -> Admission:
    """One request from its admission to its end, all of its pages published."""
    admission = admitted(pool.admit(room, page_keys, len(page_keys)))
    pool.publish(room, page_keys)
    pool.release(room)
    return admission


def state(pool: LogicalPool) -> tuple[object, ...]:
    """All that a caller can see, to compare before and after a call that fails."""
    pool.check_invariants()
    return (
        pool.available_pages,
        pool.cached_pages,
        pool.locked_pages,
        pool.free_pages_per_owner().tolist(),
        [(room, pool.pages(room).tolist(), pool.length_tokens(room)) for room in pool.rooms],
        [pool.match(np.arange(first, first + 8)) for first in range(0, 100, 10)],
    )


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
    assert (pool.available_pages, pool.cached_pages, pool.locked_pages) == (16, 0, 0)
    pool.check_invariants()


def test_prompts_that_share_one_and_a_half_pages_share_one_page() -> None:
    pool = make_pool()
    tokens = np.arange(2 * PAGE_SIZE)
    first = run(pool, 1, page_keys(tokens, PAGE_SIZE))
    tokens[PAGE_SIZE * 3 // 2 :] = 99
    second = run(pool, 2, page_keys(tokens, PAGE_SIZE))
    assert second.cached_pages == 1
    assert second.logical_pages[0] == first.logical_pages[0]
    assert second.logical_pages[1] != first.logical_pages[1]


def test_no_more_is_reused_than_the_keys_that_were_passed() -> None:
    pool = make_pool()
    prompt = keys(1, 2, 3, 4)
    run(pool, 1, prompt)
    for passed in range(5):
        assert admitted(pool.admit(2, prompt[:passed], 4)).cached_pages == passed
        pool.release(2)


def test_a_longer_request_goes_on_after_its_cached_prefix_in_owner_order() -> None:
    pool = make_pool(physical_pages=8, cp_size=4)
    run(pool, 1, keys(1, 2, 3, 4, 5, 6))
    admission = admitted(pool.admit(2, keys(1, 2, 3, 4, 5, 9), 9))
    assert admission.cached_pages == 5
    assert ((admission.logical_pages - 1) % 4).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_chunks_are_published_one_after_the_other() -> None:
    pool = make_pool()
    prompt = keys(1, 2, 3, 4)
    pool.admit(1, prompt, 5)
    for done in (1, 1, 3, 2, 4):
        pool.publish(1, prompt[:done])
    assert pool.match(prompt) == 4
    pool.release(1)
    assert (pool.cached_pages, pool.available_pages) == (4, 12)


def test_an_aborted_room_leaves_just_what_it_has_published() -> None:
    pool = make_pool()
    pool.admit(1, keys(1, 2, 3, 4), 6)
    pool.publish(1, keys(1, 2))
    pool.release(1)
    assert pool.match(keys(1, 2, 3, 4)) == 2
    assert (pool.cached_pages, pool.available_pages) == (2, 14)


def test_two_rooms_that_publish_one_prefix_keep_their_own_pages_until_released() -> None:
    pool = make_pool()
    prompt = keys(1, 2, 3, 4)
    first = admitted(pool.admit(1, prompt, 4)).logical_pages
    second = admitted(pool.admit(2, prompt, 5)).logical_pages
    pool.publish(1, prompt[:2])
    pool.publish(2, prompt)
    pool.publish(1, prompt)
    assert pool.pages(1).tolist() == first.tolist()
    assert pool.pages(2).tolist() == second.tolist()
    assert pool.locked_pages == 9
    pool.check_invariants()

    # The cache has the first room's first half and the second room's second half.
    third = admitted(pool.admit(3, prompt, 4)).logical_pages
    assert third.tolist() == [*first[:2], *second[2:4]]
    pool.release(1)
    assert pool.locked_pages == 7  # the first room's copies of the second half are free
    pool.check_invariants()
    pool.release(2)
    assert pool.locked_pages == 4
    pool.release(3)
    assert (pool.cached_pages, pool.available_pages) == (4, 12)
    pool.check_invariants()


def test_a_fork_shares_the_pages_that_its_parent_has_published() -> None:
    pool = make_pool()
    prompt = keys(1, 2, 3)
    parent = admitted(pool.admit(1, prompt, 5)).logical_pages
    pool.publish(1, prompt[:2])
    child = admitted(pool.fork(1, 2, prompt, 5))
    assert child.cached_pages == 2
    assert child.logical_pages[:2].tolist() == parent[:2].tolist()
    assert not set(child.logical_pages[2:]) & set(parent.tolist())
    assert pool.locked_pages == 8
    pool.release(1)
    assert pool.pages(2).tolist() == child.logical_pages.tolist()
    pool.check_invariants()
    pool.release(2)
    assert pool.locked_pages == 0


def test_a_fork_of_another_prompt_is_refused() -> None:
    pool = make_pool()
    pool.admit(1, keys(1, 2, 3), 3)
    pool.publish(1, keys(1, 2, 3))
    assert admitted(pool.fork(1, 2, keys(1, 2, 3, 4), 4)).cached_pages == 3
    assert admitted(pool.fork(1, 3, keys(1), 4)).cached_pages == 1
    before = state(pool)
    with pytest.raises(LayoutError, match="differ from those of room 1"):
        pool.fork(1, 4, keys(1, 9, 3, 4), 4)
    assert state(pool) == before


def test_an_extended_room_goes_on_in_owner_order() -> None:
    pool = make_pool(cp_size=4)
    pool.admit(1, keys(), 2)
    more = pool.extend(1, 3)
    assert more is not None
    assert ((pool.pages(1) - 1) % 4).tolist() == [0, 1, 2, 3, 0]
    assert pool.pages(1)[2:].tolist() == more.tolist()


def test_the_least_recently_used_prefix_makes_room() -> None:
    pool = make_pool(physical_pages=8, cp_size=2)
    old, new = np.arange(0, 8), np.arange(10, 18)
    run(pool, 1, old)
    run(pool, 2, new)
    pool.admit(3, old[:1], 1)  # the older prompt's first page is in use, and then the last used
    pool.release(3)
    assert admitted(pool.admit(4, keys(99), 3)).cached_pages == 0
    # Three pages were missing. One of each owner more is evicted, so that draws have a choice.
    assert pool.match(old) == 3
    assert pool.match(new) == 8
    assert pool.available_pages == 2


def test_admission_beside_locked_pages_returns_none_until_some_are_released() -> None:
    pool = make_pool()
    run(pool, 1, np.arange(0, 6))
    pool.admit(2, np.arange(10, 20), 10)
    before = state(pool)
    assert pool.admit(3, np.arange(20, 27), 7) is None
    assert state(pool) == before  # the six cached pages were not evicted in vain
    pool.release(2)
    assert pool.admit(3, np.arange(20, 27), 7) is not None


def test_a_prefix_that_would_be_locked_does_not_count_as_room() -> None:
    pool = make_pool()
    run(pool, 1, np.arange(0, 6))
    pool.admit(2, keys(), 8)
    # 2 free + 6 cached, but all 6 are this prompt's own prefix.
    before = state(pool)
    assert pool.admit(3, np.arange(0, 9), 9) is None
    assert state(pool) == before
    assert admitted(pool.admit(3, np.arange(0, 8), 8)).cached_pages == 6
    assert pool.available_pages == 0


def test_extension_beside_locked_pages_returns_none() -> None:
    pool = make_pool()
    pool.admit(1, keys(), 10)
    pool.admit(2, keys(), 6)
    before = state(pool)
    assert pool.extend(1, 1) is None
    assert state(pool) == before
    pool.release(2)
    assert pool.extend(1, 6) is not None


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


def test_the_cached_prefix_is_placed_and_advance_goes_on_after_it() -> None:
    pool = make_pool()
    run(pool, 1, keys(1, 2))
    admission = admitted(pool.admit(2, keys(1, 2, 3), 4))
    assert pool.length_tokens(2) == 2 * PAGE_SIZE
    locs = pool.advance(2, PAGE_SIZE + 1)
    assert (locs // PAGE_SIZE).tolist() == [
        *[admission.logical_pages[2]] * PAGE_SIZE,
        locs[-1] // 4,
    ]
    assert pool.logical_locs(2, 2 * PAGE_SIZE, 3 * PAGE_SIZE + 1).tolist() == locs.tolist()


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    pool = make_pool(prefix_caching=False)
    run(pool, 1, keys(1, 2, 3))
    assert pool.match(keys(1, 2, 3)) == 0
    assert admitted(pool.admit(2, keys(1, 2, 3), 3)).cached_pages == 0
    pool.publish(2, keys(1, 2, 3))
    assert admitted(pool.fork(2, 3, keys(1, 2, 3), 3)).cached_pages == 0
    assert pool.locked_pages == 6
    pool.release(2)
    pool.release(3)
    assert pool.available_pages == pool.total_pages


def test_clear_keeps_what_open_rooms_hold() -> None:
    pool = make_pool()
    run(pool, 1, keys(1, 2, 3, 4))
    pool.admit(2, keys(1, 2), 3)
    assert pool.clear() == 2
    assert pool.match(keys(1, 2, 3, 4)) == 2
    pool.release(2)
    assert pool.clear() == 2
    assert pool.available_pages == pool.total_pages


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

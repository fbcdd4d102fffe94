"""Prefixes in the pool: what is found, published, forked and kept, and by whom it is held."""

from __future__ import annotations

import numpy as np
import pytest

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.memory.page_keys import page_keys

from .small_pools import PAGE_SIZE, admitted, keys, make_pool, run, state


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

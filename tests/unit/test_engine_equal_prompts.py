"""Prompts that begin alike and come together: what one of them computes, the others find."""

from __future__ import annotations

import pytest

from cp_shared_kv.engine.scheduler import MOST_PASSED
from cp_shared_kv.testing.scheduled_group import Group, prompt, shares


def test_a_prompt_waits_for_the_batch_that_computes_most_of_it() -> None:
    group = Group(physical_pages=20, chunk_tokens=100)
    for room, own in enumerate(((1, 2, 3), (4, 5, 6), (7, 8, 9)), start=1):
        group.open(room, [*prompt(1, 8), *own])
    assert shares(group.run()) == [(1, 0, 11)]
    assert shares(group.run()) == [(2, 8, 3), (3, 8, 3)]


def test_who_ends_in_the_batch_passes_those_that_wait_for_it() -> None:
    group = Group(physical_pages=40, chunk_tokens=100)
    for room, length in ((1, 13), (2, 17), (3, 21)):
        group.open(room, prompt(1, length))  # each goes on where the one before it ends
    group.open(4, prompt(2, 4))
    assert shares(group.run()) == [(1, 0, 13), (4, 0, 4)]
    assert shares(group.run()) == [(2, 12, 5), (3, 12, 9)]


def test_who_would_go_on_after_the_batch_passes_nobody() -> None:
    group = Group(physical_pages=80, chunk_tokens=24)
    group.open(1, prompt(1, 9))
    group.open(2, prompt(1, 9))
    group.open(3, prompt(3, 40))
    assert shares(group.run()) == [(1, 0, 9)]
    assert shares(group.run()) == [(2, 8, 1), (3, 0, 23)]


def test_who_scratch_cannot_hold_in_the_batch_passes_nobody() -> None:
    group = Group(physical_pages=80, chunk_tokens=24, max_prefix_pages=2)
    group.cache(9, prompt(3, 12))
    group.open(1, prompt(1, 9))
    group.open(2, prompt(1, 9))
    group.open(3, [*prompt(3, 12), 1])
    assert shares(group.run()) == [(1, 0, 9)]
    assert shares(group.run()) == [(2, 8, 1)]
    assert shares(group.run()) == [(3, 12, 1)]


@pytest.mark.parametrize(("waiting", "passes"), [(MOST_PASSED, True), (MOST_PASSED + 1, False)])
def test_so_many_are_passed_and_no_more(waiting: int, passes: bool) -> None:
    group = Group(physical_pages=200, chunk_tokens=400)
    for room in range(1, 2 + waiting):
        group.open(room, prompt(1, 9))
    group.open(100, prompt(2, 4))
    assert shares(group.run()) == [(1, 0, 9), *([(100, 0, 4)] if passes else [])]
    assert len(shares(group.run())) == waiting + (not passes)


def test_pairs_of_equal_prompts_take_two_batches() -> None:
    group = Group(physical_pages=200, chunk_tokens=400)
    for room, seed in enumerate((1, 1, 2, 2, 3, 3), start=1):
        group.open(room, prompt(seed, 8))
    assert [room for room, _, _ in shares(group.run())] == [1, 3, 5]
    assert [room for room, _, _ in shares(group.run())] == [2, 4, 6]


def test_nobody_waits_twice_for_what_gives_no_numbers() -> None:
    group = Group(physical_pages=200, chunk_tokens=400)
    for room in range(1, 5):
        group.open(room, prompt(1, 9))
    planned = group.scheduler.next_batch()
    assert planned is not None
    group.scheduler.batch_done(planned[0].batch_id, {1})
    assert shares(group.run()) == [(2, 0, 9), (3, 0, 9), (4, 0, 9)]


@pytest.mark.parametrize(("own_tokens", "waits"), [(8, True), (9, False)])
def test_it_waits_for_half_of_what_it_lacks_and_not_for_less(own_tokens: int, waits: bool) -> None:
    group = Group(physical_pages=20, chunk_tokens=100)
    group.open(1, prompt(1, 9))
    group.open(2, [*prompt(1, 8), *prompt(2, own_tokens)])
    taken = [room for room, _, _ in shares(group.run())]
    assert taken == ([1] if waits else [1, 2])


def test_what_is_cached_already_is_nothing_to_wait_for() -> None:
    group = Group(physical_pages=20, chunk_tokens=100)
    group.cache(1, prompt(1, 8))
    group.open(2, [*prompt(1, 8), 1, 2, 3])
    group.open(3, [*prompt(1, 8), 4, 5, 6])
    assert shares(group.run()) == [(2, 8, 3), (3, 8, 3)]


def test_nobody_waits_for_what_will_not_be_cached() -> None:
    group = Group(physical_pages=20, chunk_tokens=100, prefix_caching=False)
    group.open(1, prompt(1, 8))
    group.open(2, prompt(1, 8))
    assert shares(group.run()) == [(1, 0, 8), (2, 0, 8)]


def test_the_end_of_the_prompt_that_is_waited_for_is_the_end_of_the_wait() -> None:
    group = Group(physical_pages=20, chunk_tokens=100)
    group.open(1, prompt(1, 9))
    group.open(2, prompt(1, 9))
    planned = group.scheduler.next_batch()
    assert planned is not None
    group.scheduler.abort(1, "the client went away")
    group.scheduler.batch_done(planned[0].batch_id)
    assert shares(group.run()) == [(2, 0, 9)]

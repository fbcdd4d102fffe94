"""Chunking and admission of the prefill scheduler, case by case; its machine walks the rest."""

from __future__ import annotations

import numpy as np
import pytest

from cp_shared_kv.engine.request import Stage
from cp_shared_kv.errors import InvariantError, ProtocolError
from cp_shared_kv.memory.page_keys import page_keys
from cp_shared_kv.testing.scheduled_group import PAGE_SIZE, Group, prompt, sends, shares


def test_a_long_prompt_runs_in_chunks_and_shares_its_last_one() -> None:
    group = Group(chunk_tokens=8)
    group.open(1, prompt(1, 19))
    group.open(2, prompt(2, 9))
    assert shares(group.run()) == [(1, 0, 8)]
    assert shares(group.run()) == [(1, 8, 8)]
    assert shares(group.run()) == [(1, 16, 3), (2, 0, 5)]
    assert shares(group.run()) == [(2, 5, 4)]
    assert group.run() is None


def test_a_prompt_finds_what_an_equal_one_has_computed_so_far() -> None:
    group = Group(chunk_tokens=8)
    group.open(1, prompt(1, 19))
    assert shares(group.run()) == [(1, 0, 8)]
    assert shares(group.run()) == [(1, 8, 8)]
    again = group.open(2, prompt(1, 19))
    assert shares(group.run()) == [(1, 16, 3), (2, 16, 3)]
    assert again.cached_tokens == 16


def test_a_page_that_is_half_full_goes_with_the_chunk_that_completes_it() -> None:
    group = Group(chunk_tokens=6)
    group.open(1, prompt(1, 17))
    assert sends(group.run()) == [(0, 0, 1, False)]
    assert sends(group.run()) == [(1, 1, 3, False)]
    assert sends(group.run()) == [(2, 3, 5, True)]


def test_a_chunk_that_completes_no_page_sends_none() -> None:
    group = Group(chunk_tokens=2)
    group.open(1, prompt(1, 5))
    assert [sends(group.run())[0] for _ in range(3)] == [
        (0, 0, 0, False),
        (1, 0, 1, False),
        (2, 1, 2, True),
    ]


@pytest.mark.parametrize("length", [3 * PAGE_SIZE - 1, 3 * PAGE_SIZE, 3 * PAGE_SIZE + 1])
def test_the_first_output_token_adds_no_page_to_what_is_sent(length: int) -> None:
    group = Group(chunk_tokens=5)
    request = group.open(1, prompt(1, length))
    sent: list[int] = []
    while batch := group.run():
        (part,) = batch.requests
        sent += range(part.send_start, part.send_stop)
        assert len(part.pages()) <= -(-length // PAGE_SIZE)
    assert sent == list(range(-(-length // PAGE_SIZE)))
    assert request.logical_pages is not None
    assert len(request.logical_pages) == len(sent)


def test_what_decode_holds_is_not_sent() -> None:
    group = Group(chunk_tokens=6)
    group.open(1, prompt(1, 17), first_position=2)
    assert sends(group.run()) == [(0, 2, 2, False)]
    assert sends(group.run()) == [(1, 2, 3, False)]
    assert sends(group.run()) == [(2, 3, 5, True)]


def test_cached_pages_are_sent_with_the_first_chunk() -> None:
    group = Group()
    tokens = prompt(1, 12)
    group.cache(1, tokens)
    request = group.open(2, [*tokens, *prompt(2, 3)])
    batch = group.run()
    assert shares(batch) == [(2, 12, 3)]
    assert sends(batch) == [(0, 0, 4, True)]
    assert request.cached_tokens == 12


@pytest.mark.parametrize("length", [8, 9, 11])
def test_a_full_hit_still_computes_from_the_last_page_boundary(length: int) -> None:
    group = Group()
    tokens = prompt(1, length)
    group.cache(1, tokens)
    group.open(2, tokens)
    cached = (length - 1) // PAGE_SIZE * PAGE_SIZE
    assert shares(group.run()) == [(2, cached, length - cached)]


def test_a_one_token_prompt_is_computed_and_sent() -> None:
    group = Group()
    group.open(1, [7])
    batch = group.run()
    assert shares(batch) == [(1, 0, 1)]
    assert sends(batch) == [(0, 0, 1, True)]


def test_a_prompt_is_cached_while_it_is_still_being_sent() -> None:
    group = Group()
    tokens = prompt(1, 8)
    group.open(1, tokens)
    group.run()
    assert group.scheduler.get(1) is not None
    request = group.open(2, [*tokens, 5])
    group.run()
    assert request.cached_tokens == 8


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    group = Group(physical_pages=5, chunk_tokens=100)
    group.open(1, prompt(1, 28))
    group.run()  # done, and its pages are locked until it is sent
    group.open(2, prompt(2, 16))
    group.open(3, prompt(3, 4))  # would fit
    assert group.run() is None
    group.finish(1)
    assert shares(group.run()) == [(2, 0, 16), (3, 0, 4)]


def test_requests_are_admitted_in_the_order_of_their_reservations() -> None:
    group = Group(chunk_tokens=100)
    for room in (3, 1, 2):
        group.open(room, prompt(room, 4))
    assert [room for room, _, _ in shares(group.run())] == [3, 1, 2]


def test_one_batch_is_in_flight_at_a_time() -> None:
    group = Group(chunk_tokens=4)
    group.open(1, prompt(1, 9))
    planned = group.scheduler.next_batch()
    assert planned is not None
    assert group.scheduler.next_batch() is None
    with pytest.raises(InvariantError, match="not in flight: 77"):
        group.scheduler.batch_done(77)
    group.scheduler.batch_done(planned[0].batch_id)
    with pytest.raises(InvariantError, match="not in flight"):
        group.scheduler.batch_done(planned[0].batch_id)


def test_an_open_room_is_not_submitted_again() -> None:
    group = Group()
    request = group.open(1, [1])
    with pytest.raises(ProtocolError, match="already open: 1"):
        group.scheduler.submit(request)


def test_a_stopped_prompt_leaves_what_it_computed_in_the_cache() -> None:
    group = Group(chunk_tokens=9)
    tokens = prompt(1, 30)
    group.open(1, tokens)
    group.run()
    assert group.scheduler.abort(1, "enough") is None  # the ranks know it
    assert group.run() is None
    group.finish(1)
    assert group.scheduler.get(1) is None
    assert group.pool.match(page_keys(np.array(tokens), PAGE_SIZE)) == 2
    assert group.pool.locked_pages == 0


def test_what_gave_no_numbers_once_is_computed_anew_for_the_next_prompt() -> None:
    group = Group(chunk_tokens=8)
    tokens = prompt(1, 8)
    request = group.open(1, tokens)
    planned = group.scheduler.next_batch()
    assert planned is not None
    assert group.scheduler.batch_done(planned[0].batch_id, {1}) == ([request], [])
    assert group.pool.match(request.page_keys) == 0
    assert group.scheduler.abort(1, "no numbers") is None
    group.finish(1)
    assert group.pool.match(request.page_keys) == 0
    group.open(2, tokens)
    assert shares(group.run()) == [(2, 0, 8)]
    assert group.pool.match(request.page_keys) == 2


def test_a_row_without_numbers_before_the_end_of_the_prompt_says_nothing() -> None:
    group = Group(chunk_tokens=4)
    request = group.open(1, prompt(1, 8))
    for without in ({1}, set[int]()):
        planned = group.scheduler.next_batch()
        assert planned is not None
        group.scheduler.batch_done(planned[0].batch_id, without)
    assert group.pool.match(request.page_keys) == 2


def test_a_batch_is_finished_before_its_stopped_request_ends() -> None:
    group = Group(chunk_tokens=4)
    request = group.open(1, prompt(1, 12))
    planned = group.scheduler.next_batch()
    assert planned is not None
    assert group.scheduler.abort(1, "enough") is None
    assert request.stage is Stage.PREFILLING
    assert group.scheduler.concluded(1, 0) is None
    assert group.scheduler.batch_done(planned[0].batch_id) == ([], [])
    assert group.scheduler.concluded(1, 1) is request


def test_a_request_that_failed_at_all_ranks_in_flight_ends_with_its_batch() -> None:
    group = Group(chunk_tokens=4)
    request = group.open(1, prompt(1, 12))
    group.run()
    planned = group.scheduler.next_batch()
    assert planned is not None
    group.scheduler.abort(1, "the wire broke")
    group.finish(1)
    assert group.scheduler.batch_done(planned[0].batch_id) == ([], [request])
    assert group.scheduler.get(1) is None


# Scratch -----------------------------------------------------------------------------------------


def with_cached_prefixes(count: int, max_prefix_pages: int) -> Group:
    """Requests 1, 2, ... each with a cached prefix of 4 pages of its own and one new token."""
    group = Group(physical_pages=40, max_prefix_pages=max_prefix_pages)
    for room in range(1, 1 + count):
        group.cache(100 + room, prompt(room, 16))
    for room in range(1, 1 + count):
        group.open(room, [*prompt(room, 16), 5])
    return group


def test_prefixes_that_overflow_scratch_together_go_into_batches_that_do_not() -> None:
    group = with_cached_prefixes(5, max_prefix_pages=9)
    rooms = [[room for room, _, _ in shares(group.run())] for _ in range(3)]
    assert rooms == [[1, 2], [3, 4], [5]]


def test_a_prefix_larger_than_the_bound_runs_alone() -> None:
    group = with_cached_prefixes(3, max_prefix_pages=3)
    rooms = [[room for room, _, _ in shares(group.run())] for _ in range(3)]
    assert rooms == [[1], [2], [3]]


def test_pages_that_prefixes_share_count_once() -> None:
    group = Group(max_prefix_pages=5)
    document = prompt(1, 16)
    group.cache(1, document)
    for room in (2, 3, 4):
        group.open(room, [*document, room])
    assert [room for room, _, _ in shares(group.run())] == [2, 3, 4]


def test_nobody_is_admitted_past_a_request_that_waits_for_scratch() -> None:
    group = with_cached_prefixes(2, max_prefix_pages=7)
    group.open(9, prompt(9, 2))  # reads no prefix at all
    assert shares(group.run()) == [(1, 16, 1)]
    assert shares(group.run()) == [(2, 16, 1), (9, 0, 2)]


def test_a_running_request_that_waits_for_scratch_can_be_stopped() -> None:
    group = with_cached_prefixes(2, max_prefix_pages=7)
    group.run()
    waiting = group.scheduler.get(2)
    assert waiting is not None
    assert waiting.stage is Stage.PREFILLING  # admitted, and not in the batch
    group.scheduler.abort(2, "enough")
    group.finish(2)
    assert group.run() is None
    group.finish(1)
    assert group.pool.locked_pages == 0


def test_the_prefix_of_a_running_prompt_grows_with_its_chunks() -> None:
    group = Group(physical_pages=40, chunk_tokens=10, max_prefix_pages=4)
    group.cache(50, prompt(50, 12))
    group.open(1, prompt(1, 15))
    group.open(2, [*prompt(50, 12), 1])
    assert shares(group.run()) == [(1, 0, 10)]
    # Three pages of prefix 1, the half-filled one included, leave no room for three of prefix 2.
    assert shares(group.run()) == [(1, 10, 5)]
    assert shares(group.run()) == [(2, 12, 1)]

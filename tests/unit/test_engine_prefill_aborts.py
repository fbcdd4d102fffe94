"""Requests that are stopped at each of their stages, by the client, decode or a failed rank."""

from __future__ import annotations

import pytest

from cp_shared_kv.engine.messages import RoomRefused
from cp_shared_kv.testing.recorded_controller import (
    FROM_DECODE,
    GONE,
    TO_DECODE,
    Controller,
    refused,
    stop,
    withdrawn,
)
from cp_shared_kv.transfer.messages import AbortRoom, FirstToken, Withdrawn


@pytest.mark.parametrize("reserved", [False, True])
def test_a_request_that_no_rank_has_heard_of_is_withdrawn(reserved: bool) -> None:
    group = Controller()
    group.submit(1)
    if reserved:
        group.reserve(1)
    group.take()
    group.cancel(1)
    assert group.take() == [("decode", withdrawn(1, GONE)), ("server", refused(1, GONE))]
    assert not group.controller.step()


def test_a_reservation_that_comes_too_late_is_given_back() -> None:
    group = Controller()
    group.submit(1)
    group.cancel(1)
    group.take()
    group.reserve(1)
    ((end, message),) = group.take()
    assert end == "decode"
    assert isinstance(message, Withdrawn)
    assert message.room == 1


def test_a_request_in_flight_is_stopped_at_ranks_and_decode_and_refused_at_the_end() -> None:
    group = Controller()
    batch = group.start(1, tokens=12)
    group.take()
    group.cancel(1)
    assert group.take() == [("ranks", stop(1, GONE)), ("decode", stop(1, GONE))]
    group.all_done(batch)
    assert not group.controller.step()
    group.conclude(1, 0, failure=GONE)
    assert group.take() == []
    group.conclude(1, 1, failure=GONE)
    assert group.take() == [("server", refused(1, GONE))]


def test_a_stopped_prompt_gives_no_first_token_though_its_last_chunk_was_computed() -> None:
    group = Controller()
    batch = group.start(1)
    group.cancel(1)
    group.done(batch, 0, (1, 42))
    group.done(batch, 1)
    assert group.taken(FirstToken) == []


def test_a_request_between_two_batches_is_stopped_like_one_in_flight() -> None:
    group = Controller()
    batch = group.start(1, tokens=12)
    group.all_done(batch)
    group.take()
    group.cancel(1)
    assert group.take() == [("ranks", stop(1, GONE)), ("decode", stop(1, GONE))]
    assert not group.controller.step()
    group.all_conclude(1, failure=GONE)
    assert group.taken(RoomRefused) == [refused(1, GONE)]


def test_a_request_that_is_being_sent_is_stopped_until_all_have_concluded() -> None:
    group = Controller()
    batch = group.start(1)
    group.all_done(batch)
    group.conclude(1, 0)
    group.take()
    group.cancel(1)
    assert group.take() == [("ranks", stop(1, GONE)), ("decode", stop(1, GONE))]
    assert group.stats().locked_tokens == 8  # rank 1 may still read them
    group.conclude(1, 1)  # it had sent everything before it heard
    assert group.taken(RoomRefused) == [refused(1, GONE)]
    assert group.stats().locked_tokens == 0


def test_a_request_that_is_decodes_alone_is_stopped_by_decode() -> None:
    """The server tells both."""
    group = Controller()
    batch = group.start(1)
    group.finish(batch, room=1)
    group.take()
    group.cancel(1)
    assert group.take() == []


def test_decode_stops_a_room_at_the_ranks() -> None:
    group = Controller()
    group.start(1)
    group.take()
    group.controller.on_decode(group.peer, AbortRoom(**FROM_DECODE, room=1, reason="sent twice"))
    assert ("ranks", stop(1, "sent twice")) in group.take()


def test_decode_hears_that_a_room_it_stops_is_open_at_no_rank() -> None:
    group = Controller()
    group.controller.on_decode(group.peer, AbortRoom(**FROM_DECODE, room=9, reason="too late"))
    ((end, message),) = group.take()
    assert end == "decode"
    assert isinstance(message, Withdrawn)
    assert message.room == 9


def test_one_failed_rank_stops_the_others_and_is_the_reason() -> None:
    group = Controller()
    batch = group.start(1, tokens=20)
    group.all_done(batch)
    batch = group.step()
    group.take()
    group.conclude(1, 1, failure="the wire broke")
    broke = stop(1, "the wire broke")
    assert group.take() == [("ranks", broke), ("decode", broke)]
    group.all_done(batch)
    assert not group.controller.step()  # the rest would be in vain
    group.conclude(1, 0, failure="told to stop")
    assert group.take() == [("server", refused(1, "the wire broke"))]
    assert group.stats().locked_tokens == 0


def test_a_room_that_failed_at_all_ranks_ends_with_the_batch_in_flight() -> None:
    group = Controller()
    batch = group.start(1, tokens=20)
    group.all_done(batch)
    batch = group.step()
    group.all_conclude(1, failure="the wire broke")
    group.take()
    group.all_done(batch)
    assert group.take() == [("server", refused(1, "the wire broke"))]
    assert group.controller.scheduler.get(1) is None


def test_a_neighbour_in_the_same_batch_goes_on_when_one_is_stopped() -> None:
    group = Controller()
    group.submit(1, tokens=3)
    group.submit(2, tokens=4, first=20)
    group.reserve(1, pages=1)
    group.reserve(2, pages=1)
    batch = group.step()
    assert [part.room for part in batch.requests] == [1, 2]
    group.cancel(1)
    group.done(batch, 0, (1, 8), (2, 9))
    group.done(batch, 1)
    assert group.taken(FirstToken) == [FirstToken(**TO_DECODE, room=2, token_id=9)]

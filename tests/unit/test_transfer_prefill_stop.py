"""A sending room that is stopped or fails: when its pages are free, and what is said."""

from __future__ import annotations

import pytest

from cp_shared_kv.errors import InvariantError
from cp_shared_kv.transfer.messages import AbortRoom, Quiesced
from cp_shared_kv.transfer.prefill_session import PrefillState

from .sending_room import LINK, at, pages, released, session, told


def test_an_abort_with_nothing_in_flight_is_quiescent_at_once() -> None:
    room = session()
    room.chunk_ready(0, pages(1), at(0), last=False)
    room.write_done(0, 1, 10)
    actions = room.abort("client gone")
    (concluded,) = told(actions)
    assert (concluded.outcome, concluded.reason, concluded.quiescent) == (
        "failed",
        "client gone",
        True,
    )
    assert (concluded.sent_chunks, concluded.total_positions) == (1, 1)
    assert released(actions)


def test_an_abort_with_writes_in_flight_quiesces_when_the_last_of_them_has_ended() -> None:
    room = session()
    room.chunk_ready(0, pages(1), at(0), last=False)
    room.chunk_ready(1, pages(2), at(1), last=False)
    actions = room.abort("client gone")
    assert told(actions)[0].quiescent is False
    assert not released(actions)
    assert room.state is PrefillState.DRAINING
    assert room.write_done(0, 1, 10) == []
    room.check_invariants()
    actions = room.write_failed(1, "link down", quiescent=True)
    assert [type(message) for message in told(actions)] == [Quiesced]
    assert released(actions)
    assert room.state is PrefillState.FAILED
    room.check_invariants()


def test_nothing_is_submitted_after_an_abort() -> None:
    room = session()
    room.abort("client gone")
    assert room.chunk_ready(0, pages(1), at(0), last=True) == []


def test_a_write_that_may_still_land_keeps_the_sources_until_the_transport_is_drained() -> None:
    room = session()
    room.chunk_ready(0, pages(1), at(0), last=False)
    actions = room.write_failed(0, "timed out", quiescent=False)
    (concluded,) = told(actions)
    assert (concluded.quiescent, "timed out" in concluded.reason) == (False, True)
    assert not released(actions)
    room.check_invariants()
    actions = room.drained()
    assert [type(message) for message in told(actions)] == [Quiesced]
    assert released(actions)
    assert room.write_done(0, 1, 10) == []


def test_a_write_that_lands_after_all_ends_the_wait() -> None:
    room = session()
    room.chunk_ready(0, pages(1), at(0), last=False)
    room.write_failed(0, "timed out", quiescent=False)
    assert released(room.write_done(0, 1, 10))


def test_draining_covers_writes_that_have_not_ended() -> None:
    room = session()
    room.chunk_ready(0, pages(1), at(0), last=False)
    room.abort("client gone")
    assert released(room.drained())
    assert room.write_failed(0, "late", quiescent=False) == []
    room.check_invariants()


def test_a_running_room_cannot_be_drained() -> None:
    with pytest.raises(InvariantError, match="had not failed"):
        session().drained()


def test_a_write_that_was_never_submitted_cannot_end() -> None:
    room = session()
    with pytest.raises(InvariantError, match="never submitted"):
        room.write_done(0, 1, 10)
    with pytest.raises(InvariantError, match="never submitted"):
        room.write_failed(0, "why", quiescent=False)


def test_a_room_that_was_never_opened_here_concludes_all_the_same() -> None:
    room = session(size=0)
    actions = room.abort("stopped before it began")
    (concluded,) = told(actions)
    assert (concluded.outcome, concluded.quiescent, concluded.total_positions) == (
        "failed",
        True,
        0,
    )


def test_an_abort_from_decode_names_where_it_came_from() -> None:
    room = session()
    (concluded,) = told(room.receive(AbortRoom(**LINK, reason="client gone")))
    assert concluded.reason == "decode stopped the room: client gone"


def test_an_abort_after_success_changes_nothing() -> None:
    room = session()
    room.chunk_ready(0, pages(), at(), last=True)
    assert room.receive(AbortRoom(**LINK, reason="too late")) == []
    assert room.state is PrefillState.SUCCEEDED


def test_a_reason_of_any_length_can_be_sent() -> None:
    room = session()
    (concluded,) = told(room.abort("x" * 10_000))
    assert len(concluded.reason) == 2000
    (concluded,) = told(session().abort(""))
    assert concluded.reason

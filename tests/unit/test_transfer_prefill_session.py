"""The sending side of a room at one rank: what it writes, says, and when its pages are free."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cp_shared_kv.errors import InvariantError, ProtocolError
from cp_shared_kv.layout.pages import PhysicalPages, Positions
from cp_shared_kv.transfer.actions import (
    PrefillAction,
    ReleaseSources,
    SendMessage,
    SubmitWrite,
)
from cp_shared_kv.transfer.messages import AbortRoom, Acknowledged, Concluded, Quiesced, Sent
from cp_shared_kv.transfer.prefill_session import PrefillSession, PrefillState
from cp_shared_kv.transfer.reservation import Reservation

ROOM, RANK, EPOCH, DECODE_EPOCH = 7, 2, 100, 200
LINK = {"epoch": DECODE_EPOCH, "peer_epoch": EPOCH, "room": ROOM}


def pages(*ids: int) -> PhysicalPages:
    return PhysicalPages(np.array(ids, dtype=np.int64))


def at(*positions: int) -> Positions:
    return Positions(np.array(positions, dtype=np.int64))


def session(first_position: int = 0, size: int = 4) -> PrefillSession:
    """Position first_position + i lands on decode's page 50 + i."""
    destinations = PhysicalPages(np.arange(50, 50 + size, dtype=np.int64))
    return PrefillSession(
        room=ROOM,
        rank=RANK,
        epoch=EPOCH,
        peer_epoch=DECODE_EPOCH,
        reservation=Reservation(first_position, destinations),
    )


def told(actions: list[PrefillAction]) -> list[Any]:
    return [action.message for action in actions if isinstance(action, SendMessage)]


def writes(actions: list[PrefillAction]) -> list[tuple[int, list[int], list[int]]]:
    return [
        (
            action.chunk,
            action.source_physical_pages.tolist(),
            action.destination_physical_pages.tolist(),
        )
        for action in actions
        if isinstance(action, SubmitWrite)
    ]


def released(actions: list[PrefillAction]) -> bool:
    return ReleaseSources(ROOM) in actions


def acknowledged(of: Any, **changes: int) -> Acknowledged:
    return Acknowledged(**({**LINK, "rank": RANK, **changes}), of=of)


def test_pages_go_to_the_destination_of_their_position() -> None:
    room = session()
    actions = room.chunk_ready(0, pages(9, 3), at(2, 0), last=False)
    assert writes(actions) == [(0, [9, 3], [52, 50])]
    assert told(actions) == []


def test_positions_are_relative_to_the_reservation() -> None:
    room = session(first_position=10)
    room.chunk_ready(0, pages(5), at(12), last=False)
    (sent,) = told(room.write_done(0, descriptors=1, nbytes=64))
    assert sent == Sent(
        epoch=EPOCH,
        peer_epoch=DECODE_EPOCH,
        room=ROOM,
        rank=RANK,
        chunk=0,
        positions=(2).to_bytes(8, "little"),
        descriptors=1,
        nbytes=64,
    )


def test_pages_that_decode_holds_already_are_not_sent() -> None:
    room = session(first_position=10)
    actions = room.chunk_ready(0, pages(4, 5, 6), at(8, 9, 10), last=False)
    assert writes(actions) == [(0, [6], [50])]


def test_sent_follows_the_write_and_the_conclusion_follows_every_sent() -> None:
    room = session()
    room.chunk_ready(0, pages(1), at(0), last=False)
    room.chunk_ready(1, pages(2), at(3), last=True)
    assert room.state is PrefillState.FLUSHING
    (first,) = told(room.write_done(1, 1, 10))
    assert (first.chunk, room.state) == (1, PrefillState.FLUSHING)
    second, concluded = told(room.write_done(0, 1, 10))
    assert second.chunk == 0
    assert concluded == Concluded(
        epoch=EPOCH,
        peer_epoch=DECODE_EPOCH,
        room=ROOM,
        rank=RANK,
        outcome="success",
        quiescent=True,
        sent_chunks=2,
        total_positions=2,
    )
    assert room.state is PrefillState.SUCCEEDED
    room.check_invariants()


def test_a_rank_that_owns_nothing_concludes_with_zero_pages() -> None:
    room = session()
    assert room.chunk_ready(0, pages(), at(), last=False) == []
    actions = room.chunk_ready(1, pages(), at(), last=True)
    (concluded,) = told(actions)
    assert (concluded.outcome, concluded.sent_chunks, concluded.total_positions) == (
        "success",
        0,
        0,
    )
    assert released(actions)


def test_a_rank_that_owns_nothing_in_the_last_chunk_concludes_after_the_chunks_before() -> None:
    room = session()
    room.chunk_ready(0, pages(1), at(0), last=False)
    assert told(room.chunk_ready(1, pages(), at(), last=True)) == []
    assert [type(message) for message in told(room.write_done(0, 1, 10))] == [Sent, Concluded]


def test_a_prompt_that_decode_holds_in_full_concludes_with_zero_pages() -> None:
    room = session(first_position=3, size=0)
    (concluded,) = told(room.chunk_ready(0, pages(1, 2, 3), at(0, 1, 2), last=True))
    assert (concluded.outcome, concluded.total_positions) == ("success", 0)


@pytest.mark.parametrize(
    ("sources", "positions", "named"),
    [
        (pages(1), at(14), "outside the reservation: 4"),
        (pages(1, 2), at(11, 11), "sent twice"),
        (pages(1), at(10), "chunk 0 before"),
        (pages(1), at(-1), "before the prompt"),
        (pages(0), at(11), "source page that is none"),
        (pages(1, 2), at(11), "different shape"),
    ],
)
def test_a_position_outside_or_doubled_fails_the_room_before_anything_is_submitted(
    sources: PhysicalPages, positions: Positions, named: str
) -> None:
    room = session(first_position=10)
    room.chunk_ready(0, pages(7), at(10), last=False)
    room.write_done(0, 1, 10)
    actions = room.chunk_ready(1, sources, positions, last=False)
    assert writes(actions) == []
    (concluded,) = told(actions)
    assert concluded.outcome == "failed"
    assert named in concluded.reason
    assert "rank 2" in concluded.reason
    assert room.state is PrefillState.FAILED
    room.check_invariants()


def test_the_same_chunk_again_is_ignored() -> None:
    room = session()
    room.chunk_ready(0, pages(1, 2), at(0, 1), last=False)
    assert room.chunk_ready(0, pages(1, 2), at(0, 1), last=False) == []
    assert room.state is PrefillState.OPEN


def test_a_different_chunk_under_the_same_number_fails_the_room() -> None:
    room = session()
    room.chunk_ready(0, pages(1), at(0), last=False)
    (concluded,) = told(room.chunk_ready(0, pages(1), at(1), last=False))
    assert "chunk 0 came twice" in concluded.reason


def test_a_chunk_behind_the_last_fails_the_room() -> None:
    room = session()
    room.chunk_ready(0, pages(1), at(0), last=True)
    (concluded,) = told(room.chunk_ready(1, pages(2), at(1), last=False))
    assert "behind the last" in concluded.reason


@pytest.mark.parametrize(
    ("chunk", "sources"),
    [(1, pages(1)), (0, pages(1)), (0, np.array([1.5])), (1, [1])],
    ids=["new", "changed", "no_integers", "no_array"],
)
def test_a_chunk_after_success_is_refused_and_the_room_stays_concluded(
    chunk: int, sources: Any
) -> None:
    room = session()
    concluded = told(room.chunk_ready(0, pages(), at(), last=True))
    with pytest.raises(ProtocolError, match="has concluded"):
        room.chunk_ready(chunk, sources, at(0), last=True)
    assert room.state is PrefillState.SUCCEEDED
    assert room.failure is None
    assert told(room.resend_due()) == concluded
    assert room.chunk_ready(0, pages(), at(), last=True) == []
    room.check_invariants()


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


def test_a_success_is_repeated_with_every_sent_until_it_is_acknowledged() -> None:
    room = session()
    room.chunk_ready(0, pages(1), at(0), last=True)
    said = told(room.write_done(0, 1, 10))
    assert told(room.resend_due()) == said
    assert not room.finished
    assert room.receive(acknowledged("concluded")) == []
    assert room.resend_due() == []
    assert room.finished
    assert room.receive(acknowledged("concluded")) == []


def test_a_failure_is_repeated_without_its_sents_and_quiesced_on_its_own() -> None:
    room = session()
    for chunk in range(2):
        room.chunk_ready(chunk, pages(chunk + 1), at(chunk), last=False)
    room.write_done(0, 1, 10)
    room.abort("client gone")
    assert [type(message) for message in told(room.resend_due())] == [Concluded]
    room.write_done(1, 1, 10)
    assert [type(message) for message in told(room.resend_due())] == [Concluded, Quiesced]
    room.receive(acknowledged("concluded"))
    assert [type(message) for message in told(room.resend_due())] == [Quiesced]
    room.receive(acknowledged("quiesced"))
    assert room.finished


def test_nothing_is_due_before_the_conclusion() -> None:
    room = session()
    room.chunk_ready(0, pages(1), at(0), last=False)
    room.write_done(0, 1, 10)
    assert room.resend_due() == []


def test_a_dead_decode_is_told_nothing_but_its_pages_wait_for_the_writes() -> None:
    room = session()
    room.chunk_ready(0, pages(1), at(0), last=False)
    assert room.peer_dead("decode exited") == []
    assert not room.finished
    actions = room.write_done(0, 1, 10)
    assert actions == [ReleaseSources(ROOM)]
    assert room.finished
    assert room.resend_due() == []


def test_a_decode_that_dies_after_success_needs_no_acknowledgement() -> None:
    room = session()
    room.chunk_ready(0, pages(), at(), last=True)
    assert room.peer_dead("decode exited") == []
    assert room.finished
    assert room.state is PrefillState.SUCCEEDED


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (acknowledged("concluded", room=8), "another room"),
        (acknowledged("concluded", epoch=199), "another life of the peer"),
        (acknowledged("concluded", peer_epoch=99), "another life of this process"),
        (acknowledged("concluded", rank=1), "another rank"),
        (acknowledged("quiesced"), "never said"),
        (AbortRoom(**{**LINK, "epoch": 199}, reason="old"), "another life of the peer"),
        (Quiesced(**LINK, rank=RANK), "not for a sending room"),
    ],
)
def test_a_message_that_is_not_for_this_room_and_life_is_refused(message: Any, named: str) -> None:
    room = session()
    room.chunk_ready(0, pages(), at(), last=True)
    with pytest.raises(ProtocolError, match=named):
        room.receive(message)
    assert not room.finished
    assert room.state is PrefillState.SUCCEEDED


def test_an_acknowledgement_of_what_was_not_said_yet_is_refused() -> None:
    room = session()
    with pytest.raises(ProtocolError, match="never said"):
        room.receive(acknowledged("concluded"))
    room.chunk_ready(0, pages(1), at(0), last=False)
    room.abort("client gone")
    with pytest.raises(ProtocolError, match="never said"):
        room.receive(acknowledged("quiesced"))


def test_a_reason_of_any_length_can_be_sent() -> None:
    room = session()
    (concluded,) = told(room.abort("x" * 10_000))
    assert len(concluded.reason) == 2000
    (concluded,) = told(session().abort(""))
    assert concluded.reason

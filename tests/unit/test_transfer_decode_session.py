"""The receiving side of a room: exact cover, failure, and when its pages may be used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.transfer.actions import (
    Covered,
    DecodeAction,
    FreePages,
    RoomFailed,
    SendMessage,
)
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.decode_session import DecodeSession, DecodeState, acknowledgement
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Acknowledged,
    Concluded,
    Quiesced,
    Released,
    Sent,
    Withdrawn,
)
from cp_shared_kv.transfer.reservation import Reservation

ROOM, EPOCH, PREFILL_EPOCH = 7, 200, 100
LINK: dict[str, Any] = {"epoch": PREFILL_EPOCH, "peer_epoch": EPOCH, "room": ROOM}
ANSWER: dict[str, Any] = {"epoch": EPOCH, "peer_epoch": PREFILL_EPOCH, "room": ROOM}


def session(cp_size: int = 2, size: int = 3) -> DecodeSession:
    return DecodeSession(
        room=ROOM,
        epoch=EPOCH,
        peer_epoch=PREFILL_EPOCH,
        cp_size=cp_size,
        reservation=Reservation(0, PhysicalPages(np.arange(1, size + 1, dtype=np.int64))),
    )


def sent(rank: int, *positions: int, chunk: int = 0, descriptors: int = 1) -> Sent:
    return Sent(
        **LINK,
        rank=rank,
        chunk=chunk,
        positions=pack_int64(np.array(positions, dtype=np.int64)),
        descriptors=descriptors,
        nbytes=10 * len(positions),
    )


def success(rank: int, total_positions: int, sent_chunks: int = 1) -> Concluded:
    return Concluded(
        **LINK,
        rank=rank,
        outcome="success",
        quiescent=True,
        sent_chunks=sent_chunks,
        total_positions=total_positions,
    )


def failed(rank: int, *, quiescent: bool, reason: str = "link down") -> Concluded:
    return Concluded(
        **LINK,
        rank=rank,
        outcome="failed",
        reason=reason,
        quiescent=quiescent,
        sent_chunks=0,
        total_positions=0,
    )


def quiesced(rank: int) -> Quiesced:
    return Quiesced(**LINK, rank=rank)


def acknowledged(rank: int, of: Any = "concluded") -> SendMessage:
    return SendMessage(Acknowledged(**ANSWER, rank=rank, of=of))


def aborting(reason: str) -> SendMessage:
    return SendMessage(AbortRoom(**ANSWER, reason=reason))


COVERED = Covered(ROOM)
FREE = FreePages(ROOM)
RELEASED = SendMessage(Released(**ANSWER))


def hear(room: DecodeSession, *messages: Any) -> list[DecodeAction]:
    actions: list[DecodeAction] = []
    for message in messages:
        actions += room.receive(message)
        room.check_invariants()
    return actions


def reason_of(actions: list[DecodeAction]) -> str:
    (reason,) = [action.reason for action in actions if isinstance(action, RoomFailed)]
    return reason


def test_decoding_starts_when_every_rank_has_concluded_and_every_page_has_come() -> None:
    room = session()
    assert hear(room, sent(0, 0, 2), sent(1, 1)) == []
    assert hear(room, success(0, 2)) == [acknowledged(0)]
    assert hear(room, success(1, 1)) == [acknowledged(1), COVERED, RELEASED]
    assert room.state is DecodeState.COVERED
    assert room.finished


def test_all_pages_are_not_enough_while_a_rank_has_not_concluded() -> None:
    room = session()
    hear(room, sent(0, 0, 1, 2), success(0, 3))
    assert room.state is DecodeState.RECEIVING
    assert room.waiting_for() == [1]
    assert COVERED in hear(room, success(1, 0, sent_chunks=0))


def test_one_page_on_eight_ranks_needs_eight_conclusions() -> None:
    room = session(cp_size=8, size=1)
    actions = hear(room, sent(3, 0), success(3, 1))
    for rank in (0, 1, 2, 4, 5, 6, 7):
        assert COVERED not in actions
        actions = hear(room, success(rank, 0, sent_chunks=0))
    assert COVERED in actions


def test_an_empty_reservation_is_covered_by_conclusions_alone() -> None:
    room = session(size=0)
    assert COVERED in hear(room, success(0, 0, 0), success(1, 0, 0))


def test_a_sent_that_comes_behind_its_conclusion_still_counts() -> None:
    room = session()
    assert hear(room, sent(1, 1), success(1, 1), success(0, 2)) == [acknowledged(1)]
    assert hear(room, sent(0, 0, 2)) == [acknowledged(0), COVERED, RELEASED]


def test_a_conclusion_is_not_acknowledged_before_the_sents_that_it_counts() -> None:
    room = session()
    assert hear(room, success(0, 2), success(0, 2)) == []
    assert hear(room, sent(0, 0, 2)) == [acknowledged(0)]
    assert hear(room, success(0, 2)) == [acknowledged(0)]


def test_a_hole_in_the_cover_fails_the_room_and_names_what_is_missing() -> None:
    room = session(size=20)
    actions = hear(room, sent(0, 0, 5), success(0, 2), sent(1, 1), success(1, 1))
    reason = reason_of(actions)
    assert "nobody sent 17 of 20 pages: positions 2, 3, 4, 6, 7, 8, 9, 10 and 9 more" in reason
    assert actions[-2:] == [FREE, RELEASED]


def test_a_page_from_two_ranks_fails_the_room_and_names_both() -> None:
    room = session()
    actions = hear(room, sent(0, 0, 1), sent(1, 1, 2))
    reason = reason_of(actions)
    assert "rank 1, chunk 0 sent twice" in reason
    assert "rank 0, chunk 0 before: 1" in reason
    assert aborting(reason) in actions
    assert room.state is DecodeState.QUARANTINED


def test_a_position_outside_the_reservation_fails_the_room() -> None:
    assert "outside the reservation: 3" in reason_of(hear(session(), sent(0, 3)))


def test_the_identical_message_again_changes_nothing() -> None:
    room = session()
    assert hear(room, sent(0, 0), sent(0, 0), sent(0, 0)) == []
    assert room.claims() == [sent(0, 0)]


@pytest.mark.parametrize("again", [sent(0, 1), sent(0, 0, descriptors=2)])
def test_a_different_message_under_the_same_key_fails_the_room(again: Sent) -> None:
    assert "sent twice, with different pages" in reason_of(hear(session(), sent(0, 0), again))


def test_the_same_chunk_number_of_two_ranks_is_two_messages() -> None:
    room = session()
    assert hear(room, sent(0, 0), sent(1, 1)) == []
    assert room.claims() == [sent(0, 0), sent(1, 1)]


@pytest.mark.parametrize(
    "messages",
    [
        [sent(0, 0), success(0, 2, sent_chunks=1)],
        [sent(0, 0), sent(0, 1, chunk=1), success(0, 1, sent_chunks=1)],
        [success(0, 1, sent_chunks=1), sent(0, 0), sent(0, 1, chunk=1)],
    ],
    ids=["more pages than sent", "fewer chunks than sent", "a chunk too many, later"],
)
def test_a_conclusion_that_does_not_count_what_was_sent_fails_the_room(messages: list[Any]) -> None:
    assert "rank 0 sent" in reason_of(hear(session(), *messages))


def test_a_failed_rank_fails_the_room_and_the_others_are_told_to_stop() -> None:
    room = session()
    actions = hear(room, failed(0, quiescent=True))
    assert actions == [
        acknowledged(0),
        RoomFailed(ROOM, "link down"),
        aborting("link down"),
    ]
    assert hear(room, failed(1, quiescent=True, reason="stopped")) == [
        acknowledged(1),
        FREE,
        RELEASED,
    ]
    assert room.failure == "link down"
    assert room.finished


def test_pages_wait_until_the_last_write_that_may_land() -> None:
    room = session()
    hear(room, failed(0, quiescent=False), failed(1, quiescent=True))
    assert room.state is DecodeState.QUARANTINED
    assert room.waiting_for() == [0]
    assert hear(room, quiesced(0)) == [acknowledged(0, "quiesced"), FREE, RELEASED]
    assert hear(room, quiesced(0)) == [acknowledged(0, "quiesced")]


def test_quiesced_may_overtake_its_conclusion() -> None:
    room = session(cp_size=1)
    assert hear(room, quiesced(0)) == [acknowledged(0, "quiesced")]
    assert hear(room, failed(0, quiescent=False)) == [
        acknowledged(0),
        RoomFailed(ROOM, "link down"),
        FREE,
        RELEASED,
    ]


def test_a_success_counts_as_quiescent_in_a_failed_room() -> None:
    room = session()
    room.abort("client gone")
    assert FREE in hear(room, success(0, 1), failed(1, quiescent=True))


def test_an_abort_stops_prefill_and_is_repeated_until_all_ranks_have_concluded() -> None:
    room = session()
    hear(room, success(0, 0, sent_chunks=0))
    assert room.abort("client gone") == [RoomFailed(ROOM, "client gone"), aborting("client gone")]
    assert room.resend_due() == [aborting("client gone")]
    hear(room, failed(1, quiescent=False))
    assert room.resend_due() == []
    hear(room, quiesced(1))
    assert room.resend_due() == []


def test_an_abort_when_all_have_concluded_bothers_nobody() -> None:
    room = session(cp_size=1)
    hear(room, success(0, 3))
    assert room.abort("took too long") == [RoomFailed(ROOM, "took too long"), FREE, RELEASED]


def test_a_covered_room_cannot_fail_any_more() -> None:
    room = session(cp_size=1)
    hear(room, sent(0, 0, 1, 2), success(0, 3))
    assert room.abort("too late") == []
    assert room.peer_dead("too late") == []
    assert hear(room, AbortRoom(**LINK, reason="late"), Withdrawn(**LINK, reason="late")) == []
    assert room.state is DecodeState.COVERED
    assert room.resend_due() == []


def test_an_abort_from_prefill_fails_the_room_and_is_not_echoed() -> None:
    room = session()
    assert hear(room, AbortRoom(**LINK, reason="too long")) == [
        RoomFailed(ROOM, "prefill stopped the room: too long")
    ]


def test_a_withdrawn_room_is_free_at_once_for_no_rank_ever_had_it() -> None:
    room = session()
    actions = hear(room, Withdrawn(**LINK, reason="client gone"))
    assert actions == [
        RoomFailed(ROOM, "prefill withdrew the room: client gone"),
        FREE,
        RELEASED,
    ]
    assert hear(room, success(0, 0, sent_chunks=0)) == [acknowledged(0)]


def test_withdrawn_ends_a_quarantine() -> None:
    room = session()
    room.abort("client gone")
    assert hear(room, Withdrawn(**LINK, reason="unknown")) == [FREE, RELEASED]


def test_a_dead_group_frees_the_pages_and_is_told_nothing() -> None:
    room = session()
    assert room.peer_dead("prefill exited") == [RoomFailed(ROOM, "prefill exited"), FREE]
    assert room.resend_due() == []


def test_two_different_conclusions_are_not_believed_until_the_group_is_dead() -> None:
    room = session()
    hear(room, success(0, 1), success(0, 2), quiesced(0), failed(1, quiescent=True))
    assert room.state is DecodeState.QUARANTINED
    assert room.failure == "CP rank 0 concluded twice, differently"
    assert room.waiting_for() == [0]
    assert hear(room, Withdrawn(**LINK, reason="unknown")) == []
    assert room.peer_dead("prefill exited") == [FREE]


@pytest.mark.parametrize(
    "messages", [[success(0, 0, 0), quiesced(0)], [quiesced(0), success(0, 0, 0)]]
)
def test_success_and_quiesced_contradict_each_other(messages: list[Any]) -> None:
    room = session()
    assert "CP rank 0" in reason_of(hear(room, *messages))
    assert room.waiting_for() == [0, 1]


def test_a_contradiction_of_a_room_that_is_over_is_refused() -> None:
    room = session(cp_size=1)
    hear(room, sent(0, 0, 1, 2), success(0, 3))
    for message in (success(0, 2), quiesced(0), sent(0, 1, chunk=9)):
        with pytest.raises(ProtocolError):
            room.receive(message)
    assert hear(room, sent(0, 0, 1, 2)) == []
    assert hear(room, success(0, 3)) == [acknowledged(0)]


def test_what_a_failed_room_is_still_sent_changes_nothing() -> None:
    room = session()
    room.abort("client gone")
    assert hear(room, sent(0, 0), sent(0, 99), sent(0, 1)) == []


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (Quiesced(**{**LINK, "room": 8}, rank=0), "another room"),
        (Quiesced(**{**LINK, "epoch": 99}, rank=0), "another life of the peer"),
        (Quiesced(**{**LINK, "peer_epoch": 199}, rank=0), "another life of this process"),
        (quiesced(2), "CP rank that does not exist"),
        (sent(2, 0), "CP rank that does not exist"),
        (success(2, 0), "CP rank that does not exist"),
        (Released(**LINK), "not for a receiving room"),
    ],
)
def test_a_message_that_is_not_for_this_room_and_life_is_refused(message: Any, named: str) -> None:
    room = session()
    with pytest.raises(ProtocolError, match=named):
        room.receive(message)
    assert room.state is DecodeState.RECEIVING
    room.check_invariants()


def test_a_rank_whose_acknowledgement_was_lost_is_answered_after_the_room_is_gone() -> None:
    assert acknowledgement(success(1, 3)) == Acknowledged(**ANSWER, rank=1, of="concluded")
    assert acknowledgement(quiesced(1)) == Acknowledged(**ANSWER, rank=1, of="quiesced")

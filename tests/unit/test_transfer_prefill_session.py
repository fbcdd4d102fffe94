"""A sending room's chunks: which pages are written where, and what is said of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.layout.pages import PhysicalPages, Positions
from cp_shared_kv.transfer.messages import Concluded, Sent
from cp_shared_kv.transfer.prefill_session import PrefillState

from .sending_room import (
    DECODE_EPOCH,
    EPOCH,
    RANK,
    ROOM,
    at,
    pages,
    released,
    session,
    told,
    writes,
)


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

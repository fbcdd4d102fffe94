"""What a sending room repeats until it is acknowledged, and the messages that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.transfer.actions import ReleaseSources
from cp_shared_kv.transfer.messages import AbortRoom, Concluded, Quiesced
from cp_shared_kv.transfer.prefill_session import PrefillState

from .sending_room import LINK, RANK, ROOM, acknowledged, at, pages, session, told


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

"""Decode workers and servers come and go, and what the prefill controller tells of it."""

from __future__ import annotations

import msgspec
import pytest

from cp_shared_kv.engine.codecs import TO_DECODE, TO_RANK, TO_SERVER, encode
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import DisconnectDecode, Paired, Registered, RoomRefused
from cp_shared_kv.engine.pairing import DecodePeer
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.testing.recorded_controller import (
    CP_SIZE,
    DECODE,
    DECODE_EPOCH,
    Controller,
    refused,
    stop,
    withdrawn,
)
from cp_shared_kv.transfer.messages import AbortRoom, Offer, Withdrawn


def test_a_new_server_hears_who_this_is_and_where_it_can_send() -> None:
    group = Controller()
    group.controller.introduce()
    assert group.take() == [("server", Registered()), ("server", Paired(decode=str(DECODE)))]


def test_all_requests_of_a_lost_decode_worker_may_begin_again_at_once() -> None:
    group = Controller()
    batch = group.start(1)
    group.submit(2)
    group.submit(3)
    group.reserve(3)
    group.take()
    group.controller.decode_lost(DECODE, "it was killed")
    assert group.take() == [
        ("server", refused(1, "it was killed", kind="unavailable")),
        ("server", refused(2, "it was killed", kind="unavailable")),
        ("server", refused(3, "it was killed", kind="unavailable")),
        ("ranks", DisconnectDecode(decode_epoch=DECODE_EPOCH, reason="it was killed")),
    ]
    # The room in flight is over when its batch is done and no rank touches its pages any more.
    group.all_conclude(1, failure="it was killed")
    assert group.controller.scheduler.pool.locked_pages > 0
    for rank in range(CP_SIZE):
        group.done(batch, rank, (1, 42))
    assert group.take() == []  # the server knows
    assert group.controller.scheduler.pool.locked_pages == 0
    group.controller.decode_lost(DECODE, "told twice")
    assert group.take() == []


def test_requests_of_another_decode_worker_go_on_when_one_is_lost() -> None:
    group = Controller()
    sent: list[msgspec.Struct] = []
    other = DecodePeer(Life("decode", 1, 1), DECODE_EPOCH + 1, send=sent.append)
    group.controller.paired(other)
    group.submit(1, max_tokens=1, decode=other.life)
    group.take()
    group.controller.decode_lost(DECODE, "it was killed")
    assert [end for end, _ in group.take()] == ["ranks"]
    (offer,) = sent
    assert isinstance(offer, Offer)
    assert offer.peer_epoch == other.epoch
    with pytest.raises(ProtocolError, match=r"decode-0\.1 speaks of a room of decode-1\.1"):
        group.reserve(1)
    request = group.controller.scheduler.get(1)
    assert request is not None
    assert request.reservation is None


def test_without_a_server_every_request_is_stopped() -> None:
    group = Controller()
    group.start(1)
    group.submit(2)
    group.take()
    group.controller.server_lost("the server was killed")
    assert group.take() == [
        ("ranks", stop(1, "the server was killed")),
        ("decode", stop(1, "the server was killed")),
        ("decode", withdrawn(2, "the server was killed")),
        ("server", refused(2, "the server was killed")),
    ]


@pytest.mark.parametrize("reason", ["", "x" * 50_000])
def test_whatever_a_process_died_of_its_rooms_can_be_told(reason: str) -> None:
    group = Controller()
    group.start(1)
    group.submit(2)
    group.take()
    group.controller.server_lost(reason)
    told = group.take()
    group.controller.decode_lost(DECODE, reason)
    told += group.take()
    assert {type(message) for _, message in told} == {
        AbortRoom,
        Withdrawn,
        RoomRefused,
        DisconnectDecode,
    }
    codecs = {"ranks": TO_RANK, "decode": TO_DECODE, "server": TO_SERVER}
    for end, message in told:
        assert codecs[end].decode(encode(message)) == message

"""Prefill groups and the server come and go, and speak only for themselves."""

from __future__ import annotations

import numpy as np
import pytest

from cp_shared_kv.engine.codecs import DECODE_TO_CONTROLLER, TO_SERVER, encode
from cp_shared_kv.engine.decode_room import PrefillPeer
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import RoomRefused
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.testing.recorded_decode import (
    CP_SIZE,
    EPOCH,
    FROM_PREFILL,
    PAGE_SIZE,
    PREFILL_EPOCH,
    Decode,
    withdraw,
)
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Declined,
    FirstToken,
    Offer,
    Quiesced,
    Withdrawn,
)


def test_what_a_lost_group_has_sent_in_full_goes_on_and_the_rest_fails_with_the_reason() -> None:
    decode = Decode(pages=14)
    decode.run(1, max_tokens=3)  # runs
    decode.offer(2)  # some pages are missing
    decode.send(2, 0)
    decode.offer(3)  # only the first token is missing
    decode.send_all(3)
    decode.offer(4, tokens=20)  # waits for pages
    decode.take()
    decode.engine.peer_dead(decode.peer, "prefill-0 was killed")
    refused = [
        RoomRefused(room=n, kind="unavailable", reason="prefill-0 was killed") for n in (2, 3)
    ]
    assert decode.take() == [("server", message) for message in refused]
    assert decode.engine.stats(1).failed_transfers_total == 1  # all pages of the third had come
    assert [one.token_ids for one in decode.steps()] == [[11], [12]]
    assert decode.free_tokens == 14 * PAGE_SIZE
    assert decode.engine.open_rooms == 0


def test_pages_of_a_group_are_awaited_until_its_rooms_have_them_all_or_are_free() -> None:
    decode = Decode()
    stranger = PrefillPeer(
        Life("prefill", 1, 1), PREFILL_EPOCH, lambda message: None, lambda rank, message: None
    )
    assert not decode.engine.awaits_pages_of(decode.peer)
    decode.offer(1)
    decode.send(1, 0)
    assert decode.engine.awaits_pages_of(decode.peer)
    assert not decode.engine.awaits_pages_of(stranger)
    decode.send_all(1)
    assert not decode.engine.awaits_pages_of(decode.peer)
    decode.offer(2)
    decode.fail(2, 0, quiescent=False)
    assert decode.engine.awaits_pages_of(decode.peer)  # in quarantine


def test_pages_in_quarantine_are_free_once_their_group_is_reaped() -> None:
    decode = Decode()
    decode.offer(1)
    decode.fail(1, 0, quiescent=False)
    decode.take()
    assert decode.free_tokens < 10 * PAGE_SIZE
    decode.engine.peer_dead(decode.peer, "prefill-0 was killed")
    assert decode.take() == []  # it had failed before, and nobody is left to be told
    assert decode.free_tokens == 10 * PAGE_SIZE


def test_one_group_has_no_say_in_anothers_rooms() -> None:
    decode = Decode()
    decode.offer(1)
    decode.take()
    stranger = PrefillPeer(
        Life("prefill", 1, 1), PREFILL_EPOCH, lambda message: None, lambda rank, message: None
    )
    (offer,) = (room.offer for room in decode.engine._rooms.values())
    for act in (
        lambda: decode.engine.on_stop(stranger, withdraw(1)),
        lambda: decode.engine.on_offer(stranger, offer),
        lambda: decode.engine.on_transfer(stranger, decode.success(1, 0)),
        lambda: decode.engine.on_first_token(
            stranger, FirstToken(**FROM_PREFILL, room=1, token_id=10)
        ),
    ):
        with pytest.raises(ProtocolError, match=r"another prefill group|prefill-1\.1 speaks"):
            act()
    assert decode.take() == []
    decode.engine.peer_dead(stranger, "it was killed")
    assert decode.take() == []
    decode.send_all(1)
    decode.first_token(1)
    assert [one.token_ids for one in decode.steps()] == [[10], [11], [12], [13]]


@pytest.mark.parametrize(
    "life",
    [{"epoch": PREFILL_EPOCH - 1, "peer_epoch": EPOCH}, {"epoch": PREFILL_EPOCH, "peer_epoch": 1}],
    ids=["sender", "receiver"],
)
@pytest.mark.parametrize("state", ["unknown", "waiting", "receiving", "covered", "running"])
def test_messages_of_another_life_are_refused_in_every_state(
    life: dict[str, int], state: str
) -> None:
    decode = Decode(pages=10)
    if state == "waiting":
        decode.offer(7, tokens=37, max_tokens=1)
    if state != "unknown":
        decode.offer(1)
    if state in ("covered", "running"):
        decode.send_all(1)
    if state == "running":
        decode.first_token(1)
    decode.take()
    before = decode.engine.stats(1)
    offer = Offer(**life, room=1, token_ids=pack_int64(np.arange(6)), max_tokens=4)
    with pytest.raises(ProtocolError, match="another life"):
        decode.engine.on_offer(decode.peer, offer)
    with pytest.raises(ProtocolError, match="another life"):
        decode.engine.on_first_token(decode.peer, FirstToken(**life, room=1, token_id=5))
    for message in (AbortRoom(**life, room=1, reason="x"), Withdrawn(**life, room=1, reason="x")):
        with pytest.raises(ProtocolError, match="another life"):
            decode.engine.on_stop(decode.peer, message)
    if state != "waiting":  # no rank knows of a room that is not reserved
        with pytest.raises(ProtocolError, match="another life"):
            decode.engine.on_transfer(decode.peer, Quiesced(**life, room=1, rank=0))
    assert decode.take() == []
    assert decode.engine.stats(1) == before


def test_without_a_server_nothing_is_left_but_what_ranks_may_still_write() -> None:
    decode = Decode(pages=14)
    decode.run(1)
    decode.offer(2)
    decode.engine.server_lost("the server was killed")
    assert not decode.engine.has_work
    for rank in range(CP_SIZE):
        decode.fail(2, rank)
    assert decode.engine.open_rooms == 0
    assert decode.free_tokens == 14 * PAGE_SIZE


@pytest.mark.parametrize("reason", ["", "x" * 50_000])
def test_whatever_a_process_died_of_its_rooms_can_be_told(reason: str) -> None:
    decode = Decode(pages=10)
    decode.offer(1, tokens=6)
    decode.offer(2, tokens=6)
    decode.offer(3, tokens=39, max_tokens=1)  # waits
    decode.take()
    decode.engine.cancel(1, reason)
    decode.engine.cancel(3, reason)
    told = decode.take()
    decode.engine.peer_dead(decode.peer, reason)
    told += decode.take()
    assert {type(message) for _, message in told} == {AbortRoom, RoomRefused, Declined}
    for end, message in told:
        codec = TO_SERVER if end == "server" else DECODE_TO_CONTROLLER
        assert codec.decode(encode(message)) == message

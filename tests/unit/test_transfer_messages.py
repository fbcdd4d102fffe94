"""Messages: what travels comes back the same, and nothing else gets in."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.testing.example_messages import ROOM, TRANSFER_MESSAGES, ints
from cp_shared_kv.transfer.codec import Codec, pack_int64, unpack_int64
from cp_shared_kv.transfer.messages import (
    MAX_MESSAGE_BYTES,
    MAX_TOKENS,
    Message,
    Offer,
    Quiesced,
    Reserve,
    Sent,
    decode,
    encode,
)

EXAMPLES = TRANSFER_MESSAGES
NAMES = [type(message).__name__ for message in EXAMPLES]


@pytest.mark.parametrize("message", EXAMPLES, ids=NAMES)
def test_every_message_comes_back_as_it_was_sent(message: Message) -> None:
    assert decode(encode(message)) == message


def test_the_examples_hold_every_kind_of_message() -> None:
    assert {type(message) for message in EXAMPLES} == set(Message.__args__)  # type: ignore[attr-defined]


def test_arrays_come_back_as_int64() -> None:
    sent = decode(encode(EXAMPLES[8]))
    assert isinstance(sent, Sent)
    assert sent.position_array().dtype == np.int64
    assert sent.position_array().tolist() == [0, 5]
    reserve = decode(encode(EXAMPLES[4]))
    assert isinstance(reserve, Reserve)
    assert reserve.reservation(9).physical_pages.tolist() == [4, 9]


def test_arrays_are_little_endian_on_every_machine() -> None:
    assert pack_int64(np.array([1], dtype=">i8")) == b"\x01" + bytes(7)
    assert unpack_int64(b"\x01" + bytes(7)).tolist() == [1]


def test_an_offer_of_a_million_tokens_fits() -> None:
    offer = Offer(**ROOM, token_ids=bytes(8 * MAX_TOKENS), max_tokens=MAX_TOKENS)
    data = encode(offer)
    assert len(data) <= MAX_MESSAGE_BYTES
    assert decode(data) == offer


def test_too_large_a_message_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ProtocolError, match=r"unread.*16777217 bytes"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


def test_too_large_a_message_is_refused_by_its_sender() -> None:
    with pytest.raises(ProtocolError, match="cannot send Sent"):
        encode(msgspec.structs.replace(SENT, positions=bytes(MAX_MESSAGE_BYTES)))


def altered(message: Message, **fields: Any) -> bytes:
    """The message's own encoding with some fields replaced, or dropped where None."""
    raw = msgspec.msgpack.decode(encode(message)) | fields
    return msgspec.msgpack.encode({k: v for k, v in raw.items() if v is not None})


HEL, OFF, FIRST, _, RES, _, _, OPEN, SENT, GOOD, BAD, _, ACK, ABORT = EXAMPLES


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (altered(SENT, type="launch"), "launch"),
        (altered(SENT, type=None), "type"),
        (altered(SENT, surprise=1), "surprise"),
        (altered(SENT, rank=None), "rank"),
        (altered(SENT, rank="3"), "rank"),
        (altered(SENT, rank=-1), "rank"),
        (altered(SENT, rank=4096), "rank"),
        (altered(SENT, room=-1), "room"),
        (altered(SENT, room=1 << 63), "room"),
        (altered(SENT, epoch=0), "epoch"),
        (altered(SENT, chunk=1 << 31), "chunk"),
        (altered(SENT, nbytes=-1), "nbytes"),
        (altered(SENT, positions=b"1234567"), "whole int64"),
        (altered(SENT, positions=ints(-1)), "positions"),
        (altered(SENT, positions=ints(1 << 41)), "positions"),
        (altered(RES, physical_pages=ints(0)), "physical_pages"),
        (altered(RES, physical_pages=ints(-3)), "physical_pages"),
        (altered(OPEN, total_positions=5), "total_positions"),
        (altered(OPEN, prompt_token_ids=ints(-1)), "prompt_token_ids"),
        (altered(OPEN, prompt_token_ids=b"1"), "prompt_token_ids"),
        (altered(OPEN, sampling={"top_p": 0.0}), "top_p"),
        (altered(OFF, token_ids=ints(-1)), "token_ids"),
        (altered(OFF, token_ids=ints(1 << 31)), "token_ids"),
        (altered(OFF, token_ids=b""), "token_ids"),
        (altered(OFF, token_ids=bytes(8 * MAX_TOKENS + 8)), "token_ids"),
        (altered(OFF, max_tokens=MAX_TOKENS + 1), "max_tokens"),
        (altered(OFF, sampling={"temperature": math.nan}), "temperature"),
        (altered(OFF, sampling={"temperature": math.inf}), "temperature"),
        (altered(OFF, sampling={"temperature": -0.5}), "temperature"),
        (altered(OFF, sampling={"top_z": 1}), "top_z"),
        (altered(FIRST, token_id=-1), "token_id"),
        (altered(GOOD, quiescent=False), "success"),
        (altered(GOOD, reason="why"), "success"),
        (altered(BAD, reason=""), "failure"),
        (altered(BAD, outcome="perhaps"), "outcome"),
        (altered(ABORT, reason=""), "reason"),
        (altered(ABORT, reason="x" * 2001), "reason"),
        (altered(ACK, of="nothing"), "of"),
        (altered(HEL, role="router"), "role"),
        (altered(HEL, page_size=0), "page_size"),
        (altered(HEL, regions=[{"name": "../etc/passwd", "nbytes": 1}]), "regions"),
        (altered(HEL, regions=[{"name": "a/b", "nbytes": 1}]), "regions"),
        (altered(HEL, regions=[{"name": "a\n", "nbytes": 1}]), "regions"),
        (altered(HEL, regions=[{"name": "a", "nbytes": 0}]), "regions"),
        (altered(HEL, index_layers=[-1]), "index_layers"),
        (encode(SENT) + b"\x00", "trailing"),
        (encode(SENT)[:-1], "truncated"),
        (b"", "truncated"),
        (b"\x91" * 100_000, "array"),
        (b"\x81\xa4type\xa2\xff\xfe", "UTF-8"),
    ],
)
def test_what_is_malformed_or_absurd_is_refused_by_name(data: bytes, named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        decode(data)


def test_a_reservation_outside_decodes_pool_is_refused() -> None:
    assert isinstance(RES, Reserve)
    with pytest.raises(ProtocolError, match=r"outside decode's pool: 9; allowed: 1 to 8"):
        RES.reservation(8)


def test_a_reservation_with_a_page_twice_is_refused() -> None:
    reserve = Reserve(**ROOM, first_position=0, physical_pages=ints(3, 4, 3))
    with pytest.raises(ProtocolError, match="page twice: 3"):
        reserve.reservation(9)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_mutated_bytes_raise_protocol_error_and_nothing_else(data: st.DataObject) -> None:
    raw = bytearray(encode(data.draw(st.sampled_from(EXAMPLES))))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        kind = data.draw(st.sampled_from(["replace", "insert", "delete", "double"]))
        if kind == "replace":
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        elif kind == "delete" and len(raw) > 1:
            del raw[at]
        else:
            raw[at:at] = raw[at:]
    check_decoded(bytes(raw))


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=200))
def test_random_bytes_raise_protocol_error_and_nothing_else(raw: bytes) -> None:
    check_decoded(raw)


def check_decoded(raw: bytes) -> None:
    """Whatever is let in is a whole message, and its arrays can be used."""
    try:
        message = decode(raw)
    except ProtocolError:
        return
    assert decode(encode(message)) == message
    if isinstance(message, Sent):
        assert (message.position_array() >= 0).all()
    if isinstance(message, Reserve):
        assert (unpack_int64(message.physical_pages) >= 1).all()


def test_a_codec_takes_only_the_messages_of_its_link() -> None:
    codec: Codec[Sent | Quiesced] = Codec(Sent | Quiesced, 1000)
    assert codec.decode(codec.encode(Quiesced(**ROOM, rank=0))) == Quiesced(**ROOM, rank=0)
    with pytest.raises(ProtocolError, match="abort_room"):
        codec.decode(encode(ABORT))


def test_fields_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        Quiesced(11, 22, 7, 3)  # type: ignore[misc]


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        SENT.rank = 1  # type: ignore[union-attr,misc]

"""What the engine's processes say to each other: no number, name or reason without a bound."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from cp_shared_kv.engine import codecs
from cp_shared_kv.engine.codecs import FROM_RANK, FROM_SERVER, TO_SERVER, encode
from cp_shared_kv.engine.messages import (
    PageMapRequest,
    Paired,
    PrefillStats,
    RoomConcluded,
    RoomRefused,
    StatsRequest,
    Tokens,
    ToldPageMap,
)
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.testing.example_messages import ENGINE_MESSAGES, TRANSFER_MESSAGES
from cp_shared_kv.transfer.codec import Codec

LINKS: list[tuple[Codec[Any], Any]] = [
    (codecs.FROM_SERVER, codecs.FromServer),
    (codecs.TO_SERVER, codecs.ToServer),
    (codecs.TO_RANK, codecs.ToRank),
    (codecs.FROM_RANK, codecs.FromRank),
    (codecs.DECODE_TO_RANK, codecs.DecodeToRank),
    (codecs.DECODE_TO_CONTROLLER, codecs.DecodeToController),
    (codecs.TO_DECODE, codecs.ToDecode),
    (codecs.FROM_SUPERVISOR, codecs.FromSupervisor),
    (codecs.FROM_SATELLITE, codecs.FromSatellite),
    (codecs.TO_SATELLITE, codecs.ToSatellite),
    (codecs.RECORDED, codecs.Recorded),
]
EXAMPLES = [*ENGINE_MESSAGES, *TRANSFER_MESSAGES]
BEYOND = (1 << 63, (1 << 64) - 1, -(1 << 63))
SIGNED = {"seed"}


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_each_link_takes_its_own_messages_and_no_others(message: msgspec.Struct) -> None:
    data = encode(message)
    taken = 0
    for codec, kinds in LINKS:
        if type(message) in get_args(kinds):
            assert codec.decode(data) == message
            taken += 1
        else:
            with pytest.raises(ProtocolError):
                codec.decode(data)
    assert taken


def test_the_examples_hold_every_message_of_every_link() -> None:
    assert {kind for _, kinds in LINKS for kind in get_args(kinds)} <= {type(m) for m in EXAMPLES}


def numbers(value: Any) -> list[tuple[Any, Any]]:
    """Where the whole numbers of a decoded message are, but those that may have a sign."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in items:
        if isinstance(inside, dict | list):
            found += numbers(inside)
        elif isinstance(inside, int) and not isinstance(inside, bool) and key not in SIGNED:
            found.append((value, key))
    return found


@pytest.mark.parametrize("message", ENGINE_MESSAGES, ids=lambda message: type(message).__name__)
def test_no_number_beyond_its_bounds_gets_in(message: msgspec.Struct) -> None:
    codec = next(codec for codec, kinds in LINKS if type(message) in get_args(kinds))
    data = encode(message)
    for at in range(len(numbers(msgspec.msgpack.decode(data)))):
        for beyond in BEYOND:
            raw = msgspec.msgpack.decode(data)
            holder, key = numbers(raw)[at]
            holder[key] = beyond
            with pytest.raises(ProtocolError):
                codec.decode(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (TO_SERVER, RoomRefused(room=1, kind="failed", reason="x" * 2001)),
        (TO_SERVER, RoomRefused(room=1, kind="failed", reason="")),
        (FROM_RANK, RoomConcluded(rank=0, room=1, pages=0, descriptors=0, bytes=0, failure="")),
    ],
)
def test_no_reason_beyond_its_bounds_gets_in(codec: Codec[Any], message: msgspec.Struct) -> None:
    with pytest.raises(ProtocolError, match="length"):
        codec.decode(encode(message))


@pytest.mark.parametrize(
    "name", ["", "decode", "decode-0", "decode-0.0", "router-0.1", "decode-0.1 "]
)
def test_no_name_gets_in_that_is_no_lifes(name: str) -> None:
    with pytest.raises(ProtocolError, match="regex"):
        TO_SERVER.decode(encode(Paired(decode=name)))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"free": []}, "free pages of 0 owners and cached pages of 2"),
        ({"free": [], "cached": []}, "free pages of 0 owners"),
        ({"free": [[2, 1], [0, 0, 1]]}, "without counts for each of 3 ranges"),
        ({"pages_per_bin": 1}, "without counts for each of 5 ranges"),
        ({"free": [[2, 2, 0], [0, 0, 1]]}, "2 free and 1 cached of 2 pages"),
        ({"free": [[2, 1, 2], [0, 0, 1]]}, "2 free and 0 cached of 1 pages"),
        ({"physical_pages": 1 << 40}, "ranges; allowed: at most"),
        ({"pages_per_bin": 0}, "pages_per_bin"),
    ],
)
def test_a_page_map_that_contradicts_itself_is_refused(change: dict, why: str) -> None:
    told = next(m for m in ENGINE_MESSAGES if isinstance(m, ToldPageMap))
    raw = msgspec.msgpack.decode(encode(told)) | change
    with pytest.raises(ProtocolError, match=why):
        TO_SERVER.decode(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize("most_bins", [0, -1, 4097])
def test_a_page_map_of_no_range_or_of_too_many_is_not_asked_for(most_bins: int) -> None:
    raw = msgspec.msgpack.decode(encode(PageMapRequest(ticket=1, most_bins=8)))
    with pytest.raises(ProtocolError, match="most_bins"):
        FROM_SERVER.decode(msgspec.msgpack.encode(raw | {"most_bins": most_bins}))


@pytest.mark.parametrize(
    "column", ["sent_pages_total", "sent_bytes_total", "read_bytes_total", "scratch_bytes"]
)
def test_figures_of_ranks_come_for_all_of_them(column: str) -> None:
    stats = next(m for m in ENGINE_MESSAGES if isinstance(m, PrefillStats))
    raw = msgspec.msgpack.decode(encode(stats)) | {column: [1]}
    with pytest.raises(ProtocolError, match="ranks"):
        TO_SERVER.decode(msgspec.msgpack.encode(raw))


def test_log_probabilities_come_one_for_each_token() -> None:
    tokens = next(m for m in ENGINE_MESSAGES if isinstance(m, Tokens))
    raw = msgspec.msgpack.decode(encode(tokens)) | {"token_ids": [3, 4]}
    with pytest.raises(ProtocolError, match="1 log-probabilities for 2 tokens"):
        TO_SERVER.decode(msgspec.msgpack.encode(raw))


def test_a_number_that_no_message_can_carry_is_refused_by_its_sender() -> None:
    with pytest.raises(ProtocolError, match="cannot send StatsRequest"):
        encode(StatsRequest(ticket=1 << 64))

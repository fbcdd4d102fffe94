"""What the engine's processes say to each other: no number, name or reason without a bound."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from cp_shared_kv.engine.batch import Batch, BatchRequest
from cp_shared_kv.engine.codecs import (
    FROM_RANK,
    FROM_SERVER,
    TO_RANK,
    TO_SERVER,
    encode,
)
from cp_shared_kv.engine.messages import (
    Admitted,
    BatchDone,
    Cancel,
    Checked,
    Configure,
    DecodeStats,
    Paired,
    PrefillStats,
    RankState,
    RoomConcluded,
    RoomRefused,
    RoomToken,
    StatsRequest,
    Submit,
    Tokens,
)
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.transfer.codec import Codec, pack_int64
from cp_shared_kv.transfer.sampling_params import SamplingParams

ONE = pack_int64(np.array([1]))
PART = BatchRequest(room=1, prefix_tokens=0, new_tokens=1, logical_pages=ONE)
EXAMPLES: list[tuple[Codec[Any], msgspec.Struct]] = [
    (
        FROM_SERVER,
        Submit(room=1, decode="decode-0.1", token_ids=ONE, max_tokens=1, sampling=SamplingParams()),
    ),
    (FROM_SERVER, Cancel(room=1)),
    (FROM_SERVER, StatsRequest(ticket=1)),
    (TO_SERVER, Paired(decode="decode-0.1")),
    (TO_SERVER, Tokens(room=1, token_ids=[1])),
    (TO_SERVER, Admitted(room=1, cached_tokens=1)),
    (TO_SERVER, RoomRefused(room=1, kind="failed", reason="why")),
    (TO_SERVER, Checked(ticket=0, problems=[])),
    (
        TO_SERVER,
        PrefillStats(
            ticket=1,
            available_tokens=1,
            cached_tokens=1,
            locked_tokens=1,
            free_pages_per_owner=[1],
            queued=1,
            running=1,
            prompt_tokens_total=1,
            cached_tokens_total=1,
            evicted_pages_total=1,
            sent_pages_total=[1],
            sent_descriptors_total=[1],
            sent_bytes_total=[1],
            scratch_bytes=[1],
            failed_rooms_total=1,
        ),
    ),
    (
        TO_SERVER,
        DecodeStats(
            ticket=1,
            available_tokens=1,
            used_tokens=1,
            waiting=1,
            running=1,
            generated_tokens_total=1,
            finished_total=1,
            failed_rooms_total=1,
        ),
    ),
    (TO_RANK, Batch(epoch=1, batch_id=1, token_ids=ONE, requests=[PART])),
    (
        TO_RANK,
        Configure(epoch=1, shared=True, physical_pages=1, kv_read="pull", scratch_limit_bytes=1),
    ),
    (
        FROM_RANK,
        BatchDone(rank=1, batch_id=1, tokens=[RoomToken(room=1, token_id=1)], scratch_bytes=1),
    ),
    (FROM_RANK, RoomConcluded(rank=1, room=1, pages=1, descriptors=1, bytes=1, failure="lost")),
    (FROM_RANK, RankState(rank=1, open_rooms=[1])),
]
BEYOND: tuple[Any, ...] = (-1, 1 << 63, (1 << 64) - 1)


def numbers(value: Any) -> list[tuple[Any, Any]]:
    """Where the whole numbers of a decoded message are."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in items:
        if isinstance(inside, dict | list):
            found += numbers(inside)
        elif isinstance(inside, int) and not isinstance(inside, bool):
            found.append((value, key))
    return found


@pytest.mark.parametrize(
    ("codec", "message"), EXAMPLES, ids=[type(message).__name__ for _, message in EXAMPLES]
)
def test_no_number_beyond_its_bounds_gets_in(codec: Codec[Any], message: msgspec.Struct) -> None:
    data = encode(message)
    assert codec.decode(data) == message
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
        (TO_SERVER, Paired(decode="d" * 41)),
    ],
)
def test_no_reason_or_name_beyond_its_bounds_gets_in(
    codec: Codec[Any], message: msgspec.Struct
) -> None:
    with pytest.raises(ProtocolError, match="length"):
        codec.decode(encode(message))


def test_a_number_that_no_message_can_carry_is_refused_by_its_sender() -> None:
    with pytest.raises(ProtocolError, match="cannot send StatsRequest"):
        encode(StatsRequest(ticket=1 << 64))

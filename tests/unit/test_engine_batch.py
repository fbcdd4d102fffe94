"""A batch message is refused for any field that does not fit the receiver's own sizes."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from cp_shared_kv.engine.batch import Batch, BatchRequest
from cp_shared_kv.engine.codecs import TO_RANK, encode
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.transfer.codec import pack_int64

SIZES: dict[str, int] = {"page_size": 4, "logical_pages": 20, "vocab_size": 100}


def ids(*values: int) -> bytes:
    return pack_int64(np.array(values, np.int64))


def part(**changes: Any) -> BatchRequest:
    """Six tokens on top of six: three pages of four, the first two complete before."""
    values: dict[str, Any] = {
        "room": 1,
        "prefix_tokens": 6,
        "new_tokens": 6,
        "logical_pages": ids(3, 20, 1),
        "chunk": 1,
        "send_start": 1,
        "send_stop": 3,
        "last": True,
    }
    return BatchRequest(**(values | changes))


def batch(*parts: BatchRequest, tokens: bytes = ids(0, 1, 2, 3, 98, 99)) -> Batch:
    return Batch(epoch=5, batch_id=9, token_ids=tokens, requests=list(parts))


def test_a_batch_that_fits_passes_and_survives_the_wire() -> None:
    whole = batch(
        part(),
        part(room=2, new_tokens=1, logical_pages=ids(5, 6), send_stop=1),
        tokens=ids(*range(7)),
    )
    whole.validate(**SIZES)
    assert TO_RANK.decode(encode(whole)) == whole
    assert whole.requests[0].pages().tolist() == [3, 20, 1]
    assert whole.tokens().tolist() == list(range(7))


def test_nothing_to_send_is_allowed_behind_what_decode_holds() -> None:
    batch(part(send_start=5, send_stop=5)).validate(**SIZES)


@pytest.mark.parametrize(
    ("malformed", "why"),
    [
        (batch(part(), tokens=ids(0, 1, 2, 3, 4, 100)), "token_ids runs from 0 to 100"),
        (batch(part(), tokens=ids(-1, 1, 2, 3, 4, 5)), "token_ids runs from -1"),
        (batch(part(), tokens=ids(0, 1, 2, 3, 4, 5)[:-1]), "not whole int64 values"),
        (batch(part(), tokens=ids(0, 1, 2, 3, 4)), "new_tokens add up to 6, with 5 given"),
        (batch(part(), tokens=ids(*range(7))), "new_tokens add up to 6, with 7 given"),
        (batch(tokens=b""), "one or more"),
        (batch(part(), part(room=2, new_tokens=0)), "new_tokens add up"),
        (batch(part(new_tokens=7), part(room=2, new_tokens=-1)), "new_tokens add up"),
        (batch(part(new_tokens=3), part(new_tokens=3)), "each once"),
        (batch(part(logical_pages=ids(3, 21, 1))), "logical_pages runs from 1 to 21"),
        (batch(part(logical_pages=ids(3, 0, 1))), "logical_pages runs from 0"),
        (batch(part(logical_pages=ids(3, 2, 1)[:-3])), "not whole int64 values"),
        (batch(part(logical_pages=ids(3, 2))), "2 pages for 6 + 6 tokens"),
        (batch(part(logical_pages=ids(3, 2, 1, 4))), "4 pages for 6 + 6 tokens"),
        (batch(part(logical_pages=b"")), "0 pages for 6 + 6 tokens"),
        (batch(part(prefix_tokens=2)), "3 pages for 2 + 6 tokens"),
        (batch(part(prefix_tokens=-1, logical_pages=ids(3, 2))), "2 pages for -1 + 6 tokens"),
        (batch(part(send_start=-1)), "positions -1 to 3 of 3 pages"),
        (batch(part(send_start=3, send_stop=2)), "positions 3 to 2 of 3 pages"),
        (batch(part(send_stop=4)), "positions 1 to 4 of 3 pages"),
        (batch(part(send_start=4, send_stop=5)), "positions 4 to 5 of 3 pages"),
    ],
)
def test_each_malformed_field_is_refused_and_named(malformed: Batch, why: str) -> None:
    with pytest.raises(ProtocolError, match="batch 9 is malformed: .*" + re.escape(why)):
        malformed.validate(**SIZES)


def test_a_second_request_is_checked_like_the_first() -> None:
    bad = part(room=2, prefix_tokens=0, new_tokens=1, logical_pages=ids(99))
    with pytest.raises(ProtocolError, match="logical_pages runs from 99"):
        batch(part(), bad, tokens=ids(*range(7))).validate(**SIZES)


def test_unknown_fields_do_not_pass_the_wire() -> None:
    data = msgspec.msgpack.encode(
        msgspec.to_builtins(batch(part()), builtin_types=[bytes]) | {"extra": 1}
    )
    with pytest.raises(ProtocolError, match="extra"):
        TO_RANK.decode(data)

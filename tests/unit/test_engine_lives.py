"""Names of lives: what they are called on links, and what is no name."""

from __future__ import annotations

import pytest

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.errors import ProtocolError


@pytest.mark.parametrize("text", ["prefill-0.1", "decode-12.7", "server-0.999999999"])
def test_a_name_is_read_as_it_was_written(text: str) -> None:
    assert str(Life.parse(text)) == text
    assert Life.parse(text.encode()).identity == text.encode()


def test_a_life_is_followed_by_the_next_of_the_same_unit() -> None:
    life = Life("prefill", 3, 1)
    assert life.next() == Life("prefill", 3, 2)
    assert life.unit == life.next().unit == "prefill-3"
    assert life.rank_identity(2) == b"prefill-3.1/rank-2"


@pytest.mark.parametrize(
    "text",
    [
        *("", "prefill-0", "prefill-0.0", "prefill-00.1", "rank-0.1", "prefill-0.1\n"),
        *("decode--1.1", "prefill-0.1/rank-0", "x" * 10_000, b"\x00\x01\x02"),
        "prefill-0.9999999999",
    ],
)
def test_anything_else_is_refused(text: str | bytes) -> None:
    with pytest.raises(ProtocolError, match="name of a process's life"):
        Life.parse(text)

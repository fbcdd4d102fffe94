"""What happened in a world, kept as it is and put into words only when something is wrong."""

from __future__ import annotations

from typing import Any

import msgspec

from cp_shared_kv.engine.messages import DecodeStats, PrefillStats, RankState, StatsRequest
from cp_shared_kv.testing.world.clock import Clock
from cp_shared_kv.transfer.codec import unpack_int64

_DULL_MESSAGES = (StatsRequest, PrefillStats, DecodeStats, RankState)
_DULL_FIELDS = {"sampling", "prompt_token_ids"}
MAX_LINE_CHARS = 300


class BrokenPromise(AssertionError):  # noqa: N818  (it is what the world is there to find)
    """Something that the design promises did not hold."""


class Trace:
    """The events of one run, in order."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: list[tuple[float, str, str, tuple[Any, ...]]] = []

    def add(self, who: str, what: str, *details: Any) -> None:
        """`who` did or met something now. Details must not change any more."""
        self._events.append((self._clock.now_seconds, who, what, details))

    def lines(self) -> list[str]:
        """One line an event."""
        return [
            f"{seconds:11.6f} {who:22} {what} {' '.join(map(_in_words, details))}"[:MAX_LINE_CHARS]
            for seconds, who, what, details in self._events
            if not (details and isinstance(details[-1], _DULL_MESSAGES))
        ]


def _in_words(detail: Any) -> str:
    if not isinstance(detail, msgspec.Struct):
        return str(detail)
    fields = {
        name: _numbers(value) if isinstance(value, bytes) else value
        for name in detail.__struct_fields__
        if name not in _DULL_FIELDS and (value := getattr(detail, name)) not in (None, "", b"", [])
    }
    told = " ".join(
        f"{name}={[_in_words(one) for one in value] if isinstance(value, list) else value}"
        for name, value in fields.items()
    )
    return f"{type(detail).__name__}({told})"


def _numbers(data: bytes) -> str:
    return ",".join(map(str, unpack_int64(data).tolist()))

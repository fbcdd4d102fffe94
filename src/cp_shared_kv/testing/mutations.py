"""What a hostile or broken peer could send: valid messages that were damaged, or made to lie."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import msgspec

EXTREMES = (0, 1, -1, 2**31 - 1, 2**31, 2**40 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
OF_ANY_TYPE: tuple[Any, ...] = (
    *(None, True, -0.0, float("nan"), float("inf"), 1e308),
    *("", "\x00", "../../etc/passwd", "x" * 3000, "é\u202e"),
    *(b"", b"\xff" * 7, bytes(16)),
    *([], [[]], [None] * 3, {}, {"type": "hello"}),
)
MEMORY = 64
"""Valid messages that later ones may be spliced with."""


class Mutator:
    """Makes mutants of encoded messages, the same ones for the same `chance` and messages.

    Most mutants are well-formed MessagePack with one or two fields changed: those get furthest.
    The others are damaged bytes. A mutant may happen to be valid, and even to be true.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._seen: deque[bytes] = deque(maxlen=MEMORY)

    def saw(self, data: bytes) -> None:
        """A valid message, to take parts from."""
        self._seen.append(data)

    def mutate(self, data: bytes) -> bytes:
        """One mutant of a valid message."""
        self.saw(data)
        if self._chance.random() < 0.25:
            return self._damaged(data)
        message = msgspec.msgpack.decode(data)
        for _ in range(self._chance.choice((1, 1, 1, 2))):
            self._change_a_field(message)
        return msgspec.msgpack.encode(message)

    # Bytes ------------------------------------------------------------------------------------

    def _damaged(self, data: bytes) -> bytes:
        raw = bytearray(data)
        for _ in range(self._chance.choice((1, 1, 2, 5))):
            at = self._chance.randrange(len(raw) + 1)
            end = min(len(raw), at + self._chance.choice((1, 1, 2, 8, 64)))
            how = self._chance.choice(("flip", "cut", "drop", "insert", "repeat", "splice"))
            if how == "flip" and at < len(raw):
                raw[at] ^= 1 << self._chance.randrange(8)
            elif how == "cut":
                del raw[at:]
            elif how == "drop":
                del raw[at:end]
            elif how == "insert":
                raw[at:at] = self._chance.randbytes(end - at + 1)
            elif how == "repeat":
                raw[at:at] = raw[at:end]
            elif how == "splice":
                other = self._chance.choice(self._seen)
                raw[at:] = other[self._chance.randrange(len(other)) :]
        return bytes(raw)

    # Fields -----------------------------------------------------------------------------------

    def _change_a_field(self, message: dict[str, Any]) -> None:
        places = list(_places(message))
        if not places or self._chance.random() < 0.06:
            message["surprise"] = 1
            return
        holder, key = self._chance.choice(places)
        how: Callable[[Any], Any] = self._chance.choice(
            (self._of_its_type, self._of_its_type, self._of_its_type, self._of_any, self._elsewhere)
        )
        if self._chance.random() < 0.05:
            del holder[key]
        elif key == "type":
            tags = [msgspec.msgpack.decode(data)["type"] for data in self._seen]
            holder[key] = self._chance.choice(tags)
        else:
            holder[key] = how(holder[key])

    def _of_its_type(self, value: Any) -> Any:
        chance = self._chance
        match value:
            case bool():
                return not value
            case int():
                near = value + chance.choice((-2, -1, 1, 2, 64))
                return max(-(2**63), min(2**64 - 1, chance.choice((near, near, *EXTREMES))))
            case float():
                return chance.choice((-value, value * 1e300, 0.0))
            case str():
                return chance.choice((value[1:], value + "!", value * 99, ""))
            case bytes():
                return self._other_integers(value)
            case list():
                return chance.choice((value[1:], value * 2, [*value, *value[:1]]))
            case _:
                return {} if value is None else None

    def _other_integers(self, data: bytes) -> bytes:
        """int64 values with one changed, dropped, doubled or swapped; or the length wrong."""
        chance = self._chance
        values = [data[at : at + 8] for at in range(0, len(data), 8)] or [bytes(8)]
        at, other = chance.randrange(len(values)), chance.randrange(len(values))
        how = chance.randrange(6)
        if how == 0:
            low = chance.choice((*EXTREMES, 1, 2, 3, 4, 5))
            values[at] = (low % 2**64).to_bytes(8, "little")
        elif how == 1:
            del values[at]
        elif how == 2:
            values[at:at] = [values[other]]
        elif how == 3:
            values[at], values[other] = values[other], values[at]
        elif how == 4:
            values[at] = ((int.from_bytes(values[at], "little") + 1) % 2**64).to_bytes(8, "little")
        else:
            values.append(b"\x01" * chance.choice((1, 7, 800)))
        return b"".join(values)

    def _of_any(self, _value: Any) -> Any:
        return self._chance.choice((*OF_ANY_TYPE, *EXTREMES))

    def _elsewhere(self, value: Any) -> Any:
        """A value of the same type out of another message."""
        other = msgspec.msgpack.decode(self._chance.choice(self._seen))
        values = [holder[key] for holder, key in _places(other)]
        alike = [v for v in values if type(v) is type(value) and v != value]
        return self._chance.choice(alike) if alike else value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything in a decoded message that can be replaced: where it hangs, and by which key."""
    inside: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inside = list(cast("dict[Any, Any]", value).items())
    elif isinstance(value, list):
        inside = list(enumerate(cast("list[Any]", value)))
    for key, held in inside:
        yield value, key
        yield from _places(held)

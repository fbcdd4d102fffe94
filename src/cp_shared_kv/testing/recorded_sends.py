"""What a state machine sends, kept in order with whom it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

M = TypeVar("M", bound=msgspec.Struct)


class RecordedSends:
    """Whatever is sent through it is kept. `check_invariants` is called when it is looked at."""

    def __init__(self, check_invariants: Callable[[], None]) -> None:
        self._check_invariants = check_invariants
        self.sent: list[tuple[str, msgspec.Struct]] = []

    def to(self, end: str) -> Callable[[msgspec.Struct], None]:
        """What sends to an end."""
        return lambda message: self.sent.append((end, message))

    def take(self) -> list[tuple[str, msgspec.Struct]]:
        """What was sent since the last call."""
        taken, self.sent = self.sent, []
        self._check_invariants()
        return taken

    def taken(self, kind: type[M]) -> list[M]:
        """The messages of one kind among those since the last call."""
        return [message for _, message in self.take() if isinstance(message, kind)]

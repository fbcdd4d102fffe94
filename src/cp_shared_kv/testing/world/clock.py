"""Virtual time: events in the order in which they are due, and nothing else moves."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Clock:
    """What is to happen, by time. Of two at one moment the one planned first comes first."""

    def __init__(self) -> None:
        self.now_seconds = 0.0
        self.events = 0
        """How many have happened."""
        self._order = count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Have `event` happen that much later."""
        heapq.heappush(self._due, (self.now_seconds + seconds, next(self._order), event))

    def step(self) -> None:
        """The next event happens. IndexError if nothing is planned."""
        self.now_seconds, _, event = heapq.heappop(self._due)
        self.events += 1
        event()

"""A clock that jumps from event to event."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Event = Callable[[], None]


class EventClock:
    """Runs events in the order of their times; those of one time in the order they were set."""

    def __init__(self) -> None:
        self.now_seconds = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._count = 0

    def at(self, seconds: float, event: Event) -> None:
        """Run an event then; at once where that time has passed."""
        self._count += 1
        heapq.heappush(self._events, (max(seconds, self.now_seconds), self._count, event))

    def run(self) -> None:
        """Run all events, and those that they set, until none is left."""
        while self._events:
            self.now_seconds, _, event = heapq.heappop(self._events)
            event()

"""Lanes for reads ahead without streams: as early as a read may happen, and as late."""

from __future__ import annotations

from collections.abc import Callable


class EagerLane:
    """A read is over before anything else happens."""

    def start(self, read: Callable[[], None]) -> Callable[[], None]:
        read()
        return lambda: None


class LateLane:
    """A read happens when it is waited for, after all that came between."""

    def start(self, read: Callable[[], None]) -> Callable[[], None]:
        return read

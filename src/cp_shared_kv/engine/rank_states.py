"""What the ranks say of themselves every second, as the controller keeps it."""

from __future__ import annotations

from collections.abc import Callable

from cp_shared_kv.engine.messages import RankState

FORGOTTEN_STATES = 10
"""A rank may hold a room so many states long after the controller is through with it: decode has
not acknowledged its conclusion yet."""


class RankStates:
    """The last state of each rank. `is_open` says whether the controller knows a room."""

    def __init__(self, is_open: Callable[[int], bool]) -> None:
        self._is_open = is_open
        self._problems: dict[int, str] = {}
        self._forgotten: dict[tuple[int, int], int] = {}
        """By rank and room: states in a row in which only the rank had the room."""

    def take(self, message: RankState) -> None:
        """One rank's state; they come about once a second."""
        self._problems.pop(message.rank, None)
        if message.problem is not None:
            self._problems[message.rank] = message.problem
        before = {key: n for key, n in self._forgotten.items() if key[0] == message.rank}
        for key in before:
            del self._forgotten[key]
        for room in message.open_rooms:
            if not self._is_open(room):
                key = message.rank, room
                self._forgotten[key] = before.get(key, 0) + 1

    def problems(self) -> list[str]:
        """What is wrong at the ranks."""
        told = [f"rank {rank}: {what}" for rank, what in sorted(self._problems.items())]
        return told + [
            f"rank {rank} holds room {room}, which has long been over"
            for (rank, room), states in sorted(self._forgotten.items())
            if states > FORGOTTEN_STATES
        ]

"""When a unit that is over starts again. No I/O; times are given, and are waking times.

What did its work starts again at once, what did not get so far after a pause that doubles. What the
system refuses (files, processes, memory) is no failure of the unit, and is tried again.
"""

from __future__ import annotations

from cp_shared_kv.engine.lives import Life

MAX_FAILED_STARTS = 3
"""A unit that died so often in a row before it was ready is not started again."""
TRY_AGAIN_SECONDS = 1.0
"""Pause before what the system refused (files, processes, memory) is tried again."""
STEADY_SECONDS = 60.0
"""A unit that lived so long is started again without a pause."""


class Restarts:
    """The units that are to start again, by name, and how often each has failed to."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[float, Life]] = {}
        """Units to start again: when, and as which life."""
        self._refused: dict[str, float] = {}
        """Units of which the system refused something: when to try again."""
        self._failed_starts: dict[str, int] = {}

    def over(
        self, life: Life, now_seconds: float, *, born_seconds: float, ready: bool, condemned: bool
    ) -> float | None:
        """Plan the life after this one; returns the pause before it, in seconds.

        `ready` says whether all its processes were; `condemned` that it could not work with others.
        A young life that was both counts as one failed start, for `ready()` forgave those before
        it: it is followed after 2 s, however often. None, with nothing planned, after too many
        failed starts in a row.
        """
        steady = now_seconds - born_seconds > STEADY_SECONDS
        served = ready and (not condemned or steady)
        failed = 0 if served else self._failed_starts.get(life.unit, 0) + 1
        self._failed_starts[life.unit] = failed
        if failed >= MAX_FAILED_STARTS:
            return None
        pause = 0.0 if steady or not failed else 2.0**failed
        self._due[life.unit] = (now_seconds + pause, life.next())
        return pause

    def due(self, now_seconds: float) -> list[Life]:
        """The lives that are to begin now."""
        return [
            life
            for unit, (when, life) in self._due.items()
            if now_seconds >= when and self.may_try(unit, now_seconds)
        ]

    def started(self, unit: str) -> None:
        """Its next life has begun."""
        del self._due[unit]
        self.accepted(unit)

    def ready(self, unit: str) -> None:
        """It has come to its work: earlier failures are forgiven."""
        self._failed_starts.pop(unit, None)

    def cancel(self, unit: str) -> None:
        """It has no next life, if one was planned."""
        self._due.pop(unit, None)

    def refused(self, unit: str, now_seconds: float) -> bool:
        """The system refused something of it; whether that is news."""
        news = unit not in self._refused
        self._refused[unit] = now_seconds + TRY_AGAIN_SECONDS
        return news

    def accepted(self, unit: str) -> None:
        """The system let pass what it may have refused before."""
        self._refused.pop(unit, None)

    def may_try(self, unit: str, now_seconds: float) -> bool:
        """Whether to ask the system for anything of this unit, so soon after a refusal."""
        return now_seconds >= self._refused.get(unit, 0.0)

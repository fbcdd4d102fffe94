"""The engine's processes as their client knows them: who is there, who is lost and why, whose books
do not balance, and which pairs stand. No I/O; times are given."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from cp_shared_kv.engine.api import UnitState
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.presence import Presence
from cp_shared_kv.engine.router import Route, Router
from cp_shared_kv.engine.unit_states import unit_states

T = TypeVar("T")


class Roster:
    """Keeps `presence` and the pairs of `router` up to date. For one event loop."""

    def __init__(self, presence: Presence, router: Router) -> None:
        self._presence = presence
        self._router = router
        self._announced: set[Life] = set()
        self._lost: set[Life] = set()
        self._why_lost: dict[str, str] = {}
        """Units that are down, and why."""
        self._problems: dict[Life, list[str]] = {}
        self._changed = asyncio.Condition()
        self.restarts: Counter[str] = Counter()
        """How often each unit was started again."""

    # What is heard ----------------------------------------------------------------------------

    def is_lost(self, life: Life) -> bool:
        """Whether it is over: what still comes from it does not count."""
        return life in self._lost

    def announced(self, life: Life) -> None:
        """The supervisor knows it."""
        self._announced.add(life)

    def is_announced(self, life: Life) -> bool:
        """Whether it is one of this run's processes, as the supervisor says."""
        return life in self._announced

    async def heard(self, life: Life, now_seconds: float) -> None:
        """A word of a life."""
        if self._presence.heard(life, now_seconds):
            await self.changed()  # requests may wait for it to answer again

    async def registered(self, life: Life) -> None:
        """It has said who it is."""
        self._why_lost.pop(life.unit, None)
        await self.changed()

    async def paired(self, group: Life, decode: Life) -> None:
        """This group can send to this decode worker."""
        if decode not in self._lost:
            self._router.paired(group, decode)
        await self.changed()

    def checked(self, life: Life, problems: list[str]) -> None:
        """What does not add up in its books."""
        self._problems[life] = problems

    def lost(self, life: Life, reason: str, *, final: bool) -> None:
        """It is over; its unit is started again unless that is final. `changed` is to follow."""
        if life not in self._lost:
            self.restarts[life.unit] += not final
        self._lost.add(life)
        self._announced.discard(life)
        if final:
            self._why_lost.pop(life.unit, None)
        else:
            self._why_lost[life.unit] = reason
        self._presence.lost(life)
        self._problems.pop(life, None)
        self._router.lost(life)

    async def changed(self) -> None:
        """Whoever waits looks again."""
        async with self._changed:
            self._changed.notify_all()

    # What is asked ----------------------------------------------------------------------------

    async def until(self, found: Callable[[], T | None]) -> T:
        """What `found` gives as soon as that is true; it looks again with each change."""
        async with self._changed:
            value = await self._changed.wait_for(found)
        assert value is not None
        return value

    def known(self) -> list[Route]:
        """The pairs that stand, of which both ends have said a word."""
        return self._presence.known(self._router.pairs)

    def answering(self) -> list[Route]:
        """Those that have answered lately."""
        return self._presence.answering(self._router.pairs)

    def silence(self, now_seconds: float) -> str | None:
        """What to say when pairs stand and none answers."""
        return self._presence.silence(self._router.pairs, now_seconds)

    def healthy(self, now_seconds: float) -> tuple[bool, str]:
        """Whether some pair stands that has answered lately, and every process's books balance."""
        for life, problems in self._problems.items():
            if problems:
                return False, f"{life.unit}: {problems[0]}"
        silent = self.silence(now_seconds)
        if silent is not None:
            return False, silent
        if self.answering():
            return True, "ok"
        if self._why_lost:
            return False, "; ".join(
                f"{unit} is starting again: {why}" for unit, why in sorted(self._why_lost.items())
            )
        return False, "the engine is starting"

    def units(self, now_seconds: float) -> list[UnitState]:
        """How each prefill group and decode worker is."""
        silent_seconds = self._presence.silent_seconds(now_seconds)
        return unit_states(silent_seconds, self._problems, self._lost, self._why_lost)

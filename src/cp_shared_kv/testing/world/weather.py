"""Chance, as the plan's odds have it, until the calm."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from cp_shared_kv.testing.world.clock import Clock
from cp_shared_kv.testing.world.plan import START_SECONDS, Plan

CALL_SECONDS, SLOW_CALL_SECONDS = 0.01, 2.0


@dataclass(frozen=True)
class Fate:
    """What becomes of a write."""

    end: Literal["lands", "breaks", "strays"]
    seconds: float
    """Until its end is reported."""
    landed: float = 1.0
    """The share that is there by then."""
    stray_seconds: float = 0.0
    """After that report, until the rest has landed or never will."""
    lands_late: bool = True
    damaged: bool = False
    """A bit of what has landed is another."""


class Weather:
    """Draws everything that chance decides while a world runs."""

    def __init__(self, plan: Plan, clock: Clock, rng: random.Random) -> None:
        self._odds, self._calm_seconds = plan.odds, plan.calm_seconds
        self._clock, self._rng = clock, rng

    @property
    def calm(self) -> bool:
        """Whether nothing breaks any more."""
        return self._clock.now_seconds >= self._calm_seconds

    @property
    def writes_take_time(self) -> bool:
        """Else a write has ended when it returns."""
        return self._odds.write_seconds > 0

    def delay_seconds(self) -> float:
        """How long a message takes."""
        rng, odds = self._rng, self._odds
        seconds = odds.delay_seconds * (0.5 + rng.random())
        if odds.spike and rng.random() < odds.spike and not self.calm:
            seconds += odds.spike_seconds * rng.random()
        return seconds

    def copies(self) -> int:
        """How often a message that is repeated until acknowledged arrives."""
        if self.calm:
            return 1
        if self._rng.random() < self._odds.lost:
            return 0
        return 2 if self._rng.random() < self._odds.doubled else 1

    def overtakes(self) -> bool:
        """Whether such a message arrives without regard to those before it."""
        return not self.calm and self._rng.random() < self._odds.reordered

    def short_seconds(self, most_seconds: float) -> float:
        """Any time up to that."""
        return self._rng.random() * most_seconds

    def call_seconds(self) -> float:
        """How long one half of a call takes that may wait for another process.

        Not before the first requests: the server takes none while a pair does not stand.
        """
        begun = self._clock.now_seconds >= START_SECONDS
        slow = begun and not self.calm and self._rng.random() < self._odds.slow_call
        return self.short_seconds(SLOW_CALL_SECONDS if slow else CALL_SECONDS)

    def fate(self) -> Fate:
        """Of a write that begins now."""
        rng, odds = self._rng, self._odds
        seconds = odds.write_seconds * (0.2 + rng.random() * (20 if rng.random() < 0.1 else 1))
        if self.calm or rng.random() >= odds.broken:
            return Fate("lands", seconds, damaged=not self.calm and rng.random() < odds.damaged)
        landed = rng.choice([0.0, rng.random()])
        if rng.random() >= odds.stray:
            return Fate("breaks", seconds, landed)
        return Fate(
            "strays",
            seconds,
            landed,
            rng.choice([0.01, 0.5, 4.0]) * rng.random(),
            rng.random() < 0.8,
        )

"""One seed, one run, and how it went."""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import closing
from dataclasses import dataclass

from cp_shared_kv.testing.world.plan import Plan, make_plan
from cp_shared_kv.testing.world.simulated import SimulatedWorld
from cp_shared_kv.testing.world.trace import BrokenPromise, Trace


@dataclass(frozen=True)
class Outcome:
    """How a run went. `broken` says what did not hold."""

    plan: Plan
    events: int
    seconds: float
    """Virtual ones."""
    answers: tuple[str | None, ...]
    trace: Trace
    seen: Counter[str]
    """What has happened, how often."""
    broken: str | None = None

    def report(self, lines: int | None = None) -> str:
        """The trace, or the end of it, and how to see it again."""
        told = self.trace.lines()
        shown = told if lines is None else told[-lines:]
        what = self.broken or "every promise held"
        return "\n".join(
            [
                f"seed {self.plan.seed}, {self.plan.kind}: {self.plan.shape}",
                *([f"... {len(told) - len(shown)} lines"] if len(shown) < len(told) else []),
                *shown,
                f"seed {self.plan.seed}: {what}",
                f"again: python -m cp_shared_kv.testing.world {self.plan.seed}",
            ]
        )


def run(seed: int) -> Outcome:
    """Run the world of a seed; never raises for what it finds."""
    world = SimulatedWorld(make_plan(seed))
    broken: str | None = None
    try:
        with closing(world):
            world.run()
    except BrokenPromise as error:
        broken = str(error)
    except Exception:  # whatever a process raises that it does not handle itself
        broken = traceback.format_exc()
    return Outcome(
        world.plan,
        world.clock.events,
        world.clock.now_seconds,
        tuple(one.answer for one in world.clients.all),
        world.trace,
        world.seen,
        broken,
    )

"""Every order of everything in a small room: no schedule is left to chance."""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any

import numpy as np
import pytest

from cp_shared_kv.testing.room_world import RoomPlan, RoomWorld

STEPS = ("open", "chunk", "land")
FAULTS = (
    *("fail", "lose track", "abort rank", "abort decode", "silence"),
    *("kill rank", "kill decode", "kill group", "withdraw"),
)


def frozen(value: Any) -> Any:
    """A hashable value that is equal for equal states."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return frozenset((key, frozen(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(frozen(item) for item in value)
    if isinstance(value, set):
        return frozenset(value)
    if hasattr(value, "__dict__") and not isinstance(value, Enum):
        return frozen(vars(value))
    return value


def every_world(plan: RoomPlan, faults: int) -> int:
    """Visit all states of a room: every order, every message lost, late or doubled.

    A message, once sent, may arrive at any later time, any number of times, or never: so it
    stays on its link, and a link is a set. From each state, settling must end the room.
    """
    start = RoomWorld(plan)
    seen = {(frozen(start), faults)}
    pending = [(start, faults)]
    while pending:
        world, faults_left = pending.pop()
        copy.deepcopy(world).settle()
        moves = [(event, i) for event in STEPS for i in range(plan.cp_size)]
        moves += [("double", i) for i in range(len(world.links))]
        moves += [("drain", i) for i in range(plan.cp_size)]
        if faults_left:
            moves += [(event, i) for event in FAULTS for i in range(plan.cp_size)]
        for event, choice in moves:
            after = copy.deepcopy(world)
            after.happen(event, choice)
            after.links = sorted(set(after.links), key=repr)
            left = faults_left - (event in FAULTS)
            if (key := (frozen(after), left)) not in seen:
                seen.add(key)
                pending.append((after, left))
    return len(seen)


@pytest.mark.parametrize(
    ("plan", "faults", "states"),
    [
        (RoomPlan(cp_size=2, pages=3, chunks=1), 0, 75),
        (RoomPlan(cp_size=1, pages=2, chunks=2), 1, 190),
        pytest.param(RoomPlan(cp_size=2, pages=3, chunks=2), 1, 9900, marks=pytest.mark.soak),
    ],
)
def test_every_order_of_a_small_room_keeps_the_promises(
    plan: RoomPlan, faults: int, states: int
) -> None:
    # Far fewer states than there were would mean that the search no longer gets anywhere.
    assert every_world(plan, faults) >= states // 2

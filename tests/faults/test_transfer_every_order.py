"""Every order of everything in a small room: no schedule is left to chance."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from enum import Enum
from typing import Any

import numpy as np
import pytest

from cp_shared_kv.testing.room_world import RoomPlan, RoomWorld

STEPS_OF_A_RANK = ("open", "chunk", "drain")
STEPS_OF_A_WRITE = ("land", "land late")
FAULTS_OF_A_RANK = ("abort rank",)
FAULTS_OF_A_WRITE = ("fail", "lose track")
FAULTS_OF_THE_ROOM = ("abort decode", "kill decode", "kill group", "withdraw")


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


def moves(world: RoomWorld, faults: bool) -> Iterator[tuple[str, int, bool]]:
    """Every event that can happen now: its name, where, and whether it is a fault."""
    ranks, writes = range(world.plan.cp_size), range(len(world.writes))
    yield from ((event, i, False) for event in STEPS_OF_A_RANK for i in ranks)
    yield from ((event, i, False) for event in STEPS_OF_A_WRITE for i in writes)
    yield from (("double", i, False) for i in range(len(world.links)))
    if faults:
        yield from ((event, i, True) for event in FAULTS_OF_A_RANK for i in ranks)
        yield from ((event, i, True) for event in FAULTS_OF_A_WRITE for i in writes)
        yield from ((event, 0, True) for event in FAULTS_OF_THE_ROOM)


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
        for event, choice, faulty in moves(world, faults_left > 0):
            after = copy.deepcopy(world)
            after.happen(event, choice)
            after.links = sorted(set(after.links), key=repr)
            left = faults_left - faulty
            if (key := (frozen(after), left)) not in seen:
                seen.add(key)
                pending.append((after, left))
    return len(seen)


@pytest.mark.parametrize(
    ("plan", "faults", "states"),
    [
        (RoomPlan(cp_size=2, pages=3, chunks=1), 0, 74),
        (RoomPlan(cp_size=2, pages=3, chunks=3), 0, 462),
        (RoomPlan(cp_size=1, pages=2, chunks=3), 1, 207),
        pytest.param(RoomPlan(cp_size=2, pages=3, chunks=1), 1, 5886, marks=pytest.mark.soak),
    ],
    ids=["two ranks", "two ranks, three chunks", "one rank, one fault", "two ranks, one fault"],
)
def test_every_order_of_a_small_room_keeps_the_promises(
    plan: RoomPlan, faults: int, states: int
) -> None:
    # Far fewer states than there were would mean that the search no longer gets anywhere.
    assert every_world(plan, faults) >= states // 2

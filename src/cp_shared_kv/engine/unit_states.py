"""How each prefill group and decode worker is, from what the client of the engine has heard."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cp_shared_kv.engine.api import UnitState
from cp_shared_kv.engine.lives import Life


def unit_states(
    silent_seconds: Mapping[Life, float],
    problems: Mapping[Life, list[str]],
    lost: Collection[Life],
    why_lost: Mapping[str, str],
) -> list[UnitState]:
    """The units that are up, and those of `why_lost` that are to come back, in order.

    `silent_seconds` says how long ago each life that is up last answered, `problems` what does not
    add up in its books. A unit that is down has the number of its last life.
    """
    up = [
        UnitState(
            unit=life.unit,
            life=life.number,
            up=True,
            silent_seconds=silent,
            problems=problems.get(life, []),
        )
        for life, silent in silent_seconds.items()
    ]
    down = [
        UnitState(
            unit=unit,
            life=max((life.number for life in lost if life.unit == unit), default=1),
            up=False,
            silent_seconds=None,
            problems=[reason],
        )
        for unit, reason in why_lost.items()
    ]
    return sorted(up + down, key=_place)


def _place(state: UnitState) -> tuple[bool, int]:
    role, _, index = state.unit.partition("-")
    return role != "prefill", int(index)

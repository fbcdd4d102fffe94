"""When a unit starts again: pauses, failed starts in a row, and refusals of the system."""

from __future__ import annotations

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.restarts import (
    MAX_FAILED_STARTS,
    STEADY_SECONDS,
    TRY_AGAIN_SECONDS,
    Restarts,
)

FIRST = Life("decode", 0, 1)
SECOND = FIRST.next()
UNIT = FIRST.unit
BORN = 1000.0
NOW = BORN + 5.0


def over(
    restarts: Restarts,
    life: Life = FIRST,
    *,
    lived_seconds: float = 5.0,
    ready: bool = True,
    condemned: bool = False,
) -> float | None:
    """It ended now; the pause before the next life."""
    return restarts.over(
        life, NOW, born_seconds=NOW - lived_seconds, ready=ready, condemned=condemned
    )


def test_what_did_its_work_starts_again_at_once() -> None:
    restarts = Restarts()
    assert over(restarts) == 0.0
    assert restarts.due(NOW) == [SECOND]
    restarts.started(UNIT)
    assert restarts.due(NOW) == []


def test_a_life_that_was_never_ready_is_followed_after_a_pause() -> None:
    restarts = Restarts()
    assert over(restarts, ready=False) == 2.0
    assert restarts.due(NOW + 1.9) == []
    assert restarts.due(NOW + 2.0) == [SECOND]


def test_each_failed_start_in_a_row_doubles_the_pause_until_there_were_too_many() -> None:
    restarts = Restarts()
    pauses = [over(restarts, ready=False) for _ in range(MAX_FAILED_STARTS)]
    assert pauses == [2.0, 4.0, None]


def test_after_too_many_failed_starts_nothing_more_is_planned() -> None:
    restarts = Restarts()
    for _ in range(MAX_FAILED_STARTS):
        over(restarts, ready=False)
        for life in restarts.due(NOW + 10.0):
            restarts.started(life.unit)
    assert restarts.due(NOW + 1000.0) == []


def test_a_start_that_succeeded_forgives_those_that_did_not() -> None:
    restarts = Restarts()
    over(restarts, ready=False)
    restarts.ready(UNIT)
    assert over(restarts, ready=False) == 2.0


def test_failed_starts_are_each_units_own() -> None:
    restarts = Restarts()
    assert over(restarts, FIRST, ready=False) == 2.0
    assert over(restarts, Life("decode", 1, 1), ready=False) == 2.0


def test_a_young_life_that_was_given_up_is_followed_after_a_pause_however_often() -> None:
    restarts, life = Restarts(), FIRST
    for _ in range(2 * MAX_FAILED_STARTS):
        restarts.ready(UNIT)
        assert over(restarts, life, condemned=True) == 2.0
        assert restarts.due(NOW + 1.9) == []
        (life,) = restarts.due(NOW + 2.0)
        restarts.started(UNIT)


def test_a_life_that_was_given_up_before_it_was_ready_failed_to_start() -> None:
    restarts = Restarts()
    pauses = [over(restarts, ready=False, condemned=True) for _ in range(MAX_FAILED_STARTS)]
    assert pauses == [2.0, 4.0, None]


def test_a_steady_life_that_was_given_up_did_its_work() -> None:
    assert over(Restarts(), condemned=True, lived_seconds=STEADY_SECONDS + 1.0) == 0.0


def test_a_steady_life_that_was_never_ready_failed_but_is_not_waited_for() -> None:
    restarts = Restarts()
    long = STEADY_SECONDS + 1.0
    pauses = [over(restarts, ready=False, lived_seconds=long) for _ in range(MAX_FAILED_STARTS)]
    assert pauses == [0.0, 0.0, None]


def test_a_refusal_of_the_system_is_news_once_and_holds_the_unit_up_for_a_while() -> None:
    restarts = Restarts()
    over(restarts)
    assert restarts.refused(UNIT, NOW)
    assert restarts.due(NOW) == []
    later = NOW + TRY_AGAIN_SECONDS
    assert restarts.due(later) == [SECOND]
    assert not restarts.refused(UNIT, later)
    assert not restarts.may_try(UNIT, later)
    restarts.started(UNIT)
    assert restarts.may_try(UNIT, later)
    assert restarts.refused(UNIT, later)


def test_a_cancelled_unit_does_not_come_back() -> None:
    restarts = Restarts()
    over(restarts)
    restarts.cancel(UNIT)
    assert restarts.due(NOW + 1000.0) == []

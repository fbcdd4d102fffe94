"""Random schedules of both sides of a room, over links that lose, double and reorder messages."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, note, settings

from cp_shared_kv.testing.room_world import RoomPlan, RoomWorld

HARMLESS = ("open", "chunk", "deliver", "land", "resend", "double", "drop", "chunk again")
# Frequent events stand more than once: a room that dies young proves little.
EVENTS = (
    *["open", "chunk", "deliver", "land"] * 15,
    *["resend", "double", "drop", "chunk again"] * 5,
    *["earlier life", "fail", "lose track", "land late", "drain"] * 2,
    *["abort rank", "abort decode", "silence", "kill rank", "kill decode", "kill group"],
    "withdraw",
)
PLANS = st.builds(
    RoomPlan, cp_size=st.integers(1, 4), pages=st.integers(0, 6), chunks=st.integers(1, 3)
)
WRONG_PLANS = st.builds(
    RoomPlan,
    cp_size=st.integers(2, 4),
    pages=st.integers(8, 10),
    chunks=st.integers(1, 2),
    mistake=st.sampled_from(["skips a page", "sends another rank's page", "sends past the end"]),
)
# Two bytes a step, long enough to get somewhere. Zero bytes shrink to "nothing".
SCHEDULES = st.binary(min_size=60, max_size=160)


def run(plan: RoomPlan, schedule: bytes, events: tuple[str, ...]) -> RoomWorld:
    """A world after the whole schedule, and after all that it left open was settled."""
    choices = ("nothing", *events)
    world = RoomWorld(plan)
    for event, choice in zip(schedule[::2], schedule[1::2], strict=False):
        note(f"{choices[event % len(choices)]} {choice}")
        world.happen(choices[event % len(choices)], choice)
    world.settle()
    return world


@settings(max_examples=400, deadline=None)
@given(plan=PLANS, schedule=SCHEDULES)
def test_no_schedule_loses_doubles_or_reuses_a_page_too_early(
    plan: RoomPlan, schedule: bytes
) -> None:
    run(plan, schedule, EVENTS)


@settings(max_examples=100, deadline=None)
@given(plan=PLANS, schedule=SCHEDULES)
def test_a_room_without_a_fault_is_covered_whatever_the_links_do(
    plan: RoomPlan, schedule: bytes
) -> None:
    assert run(plan, schedule, HARMLESS).outcomes == ["covered"]


@settings(max_examples=100, deadline=None)
@given(plan=WRONG_PLANS, schedule=SCHEDULES)
def test_a_rank_that_sends_the_wrong_pages_fails_the_room_in_every_order(
    plan: RoomPlan, schedule: bytes
) -> None:
    world = run(plan, schedule, HARMLESS)
    assert world.outcomes == ["failed"]
    assert world.freed

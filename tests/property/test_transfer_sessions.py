"""Random schedules of both sides of a room, over links that lose, double and reorder; nonsense."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, note, settings

from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.testing.room_world import (
    DECODE_EPOCH,
    PREFILL_EPOCH,
    ROOM,
    RoomPlan,
    RoomWorld,
)
from cp_shared_kv.transfer.actions import Covered, FreePages, RoomFailed, SendMessage
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.decode_session import DecodeSession
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Concluded,
    Message,
    Quiesced,
    Released,
    Sent,
    Withdrawn,
    decode,
    encode,
)
from cp_shared_kv.transfer.reservation import Reservation

LINK: dict[str, Any] = {"epoch": PREFILL_EPOCH, "peer_epoch": DECODE_EPOCH, "room": ROOM}

HARMLESS = ("open", "chunk", "deliver", "land", "resend", "double", "drop", "chunk again")
# Frequent events stand more than once: a room that dies young proves little.
EVENTS = (
    *["open", "chunk", "deliver", "land"] * 15,
    *["resend", "double", "drop", "chunk again"] * 5,
    *["earlier life", "fail", "lose track", "land late", "drain"] * 2,
    *["abort rank", "abort decode", "kill decode", "kill group", "withdraw"],
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


# Well-formed, from the right life, and otherwise nonsense: what a broken or hostile rank may say.
NUMBERS = st.integers(0, 3) | st.sampled_from([1 << 40])
NONSENSE = st.one_of(
    st.builds(
        lambda rank, chunk, positions: Sent(
            **LINK, rank=rank, chunk=chunk, positions=pack_int64(positions), descriptors=1, nbytes=1
        ),
        st.integers(0, 2),
        st.integers(0, 2),
        st.lists(NUMBERS, max_size=3).map(lambda values: np.array(values, dtype=np.int64)),
    ),
    st.builds(
        lambda rank, success, quiescent, chunks, positions: Concluded(
            **LINK,
            rank=rank,
            outcome="success" if success else "failed",
            reason="" if success else "why not",
            quiescent=success or quiescent,
            sent_chunks=chunks,
            total_positions=positions,
        ),
        st.integers(0, 2),
        st.booleans(),
        st.booleans(),
        NUMBERS,
        NUMBERS,
    ),
    st.builds(lambda rank: Quiesced(**LINK, rank=rank), st.integers(0, 2)),
    st.just(AbortRoom(**LINK, reason="stop")),
    st.just(Withdrawn(**LINK, reason="gone")),
    st.just(Released(**LINK)),
)


@settings(max_examples=200, deadline=None)
@given(pages=st.integers(0, 4), messages=st.lists(NONSENSE, min_size=5, max_size=25))
def test_nothing_that_ranks_may_say_breaks_the_books_of_decode(
    pages: int, messages: list[Message]
) -> None:
    reservation = Reservation(0, PhysicalPages(np.arange(1, pages + 1, dtype=np.int64)))
    session = DecodeSession(ROOM, DECODE_EPOCH, PREFILL_EPOCH, 2, reservation)
    outcomes: list[type] = []
    for message in messages:
        before = (session.state, session.claims())
        try:
            actions = session.receive(decode(encode(message)))
        except ProtocolError:
            assert (session.state, session.claims()) == before
            actions = []
        session.check_invariants()
        outcomes += [type(action) for action in actions if not isinstance(action, SendMessage)]
    assert outcomes in ([], [Covered], [RoomFailed], [RoomFailed, FreePages])

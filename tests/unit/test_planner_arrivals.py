"""Who asks when: open loops at recorded times, closed loops of users who wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.planner.arrivals import Arrivals, Ask, ClosedLoop, OpenLoop
from cp_shared_kv.planner.clock import EventClock
from cp_shared_kv.planner.trace import Trace
from cp_shared_kv.planner.trace_files import read_trace

TURNS = 4


@pytest.fixture
def conversations(tmp_path: Path) -> Trace:
    """Three, of four requests each, with 10, 2,000 and 30 seconds to think."""
    thinks = [0.0, 10.0, 2000.0, 30.0]
    reqs = [[100.0 * turn, 64, 1, [[1, 1]], 0, 5.0, think] for turn, think in enumerate(thinks)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps({"block_size": 64, "reqs": reqs})] * 3))
    return read_trace(path)


@pytest.fixture
def requests(tmp_path: Path) -> Trace:
    path = tmp_path / "l.csv"
    path.write_text("arrival_seconds,prompt_tokens,output_tokens\n3,64,1\n4,64,1\n9,64,1\n")
    return read_trace(path)


def asked(arrivals: Arrivals, answer_seconds: float = 1.0) -> list[Ask]:
    """All that is asked when every answer takes as long."""
    clock, seen = EventClock(), list[Ask]()

    def expect(ask: Ask | None) -> None:
        if ask is not None:
            clock.at(ask.at_seconds, lambda: arrive(ask))

    def arrive(ask: Ask) -> None:
        assert clock.now_seconds == ask.at_seconds
        seen.append(ask)
        expect(arrivals.next_arrival(ask))
        expect(arrivals.answered(ask, clock.now_seconds + answer_seconds))

    for ask in arrivals.first():
        expect(ask)
    clock.run()
    return seen


def closed(trace: Trace, requests: int, **settings: Any) -> ClosedLoop:
    defaults: dict[str, Any] = {"users": 1, "longest_think_seconds": 1800.0}
    return ClosedLoop(trace, requests, **(defaults | settings))


def test_a_user_waits_for_the_answer_and_thinks_at_most_so_long(conversations: Trace) -> None:
    first = asked(closed(conversations, TURNS))
    assert [ask.at_seconds for ask in first] == [0.0, 11.0, 1812.0, 1843.0]
    rows = [ask.row for ask in first]
    assert rows == list(range(rows[0], rows[0] + TURNS))


def test_the_next_conversation_begins_when_the_last_answer_is_there(conversations: Trace) -> None:
    seen = asked(closed(conversations, 2 * TURNS))
    assert seen[TURNS].at_seconds == seen[TURNS - 1].at_seconds + 1
    assert [ask.instance for ask in seen] == [0] * TURNS + [1] * TURNS
    assert seen[0].row != seen[TURNS].row


def test_conversations_are_dealt_once_each_and_then_again(conversations: Trace) -> None:
    seen = asked(closed(conversations, 6 * TURNS))
    begun = [ask.row // TURNS for ask in seen[::TURNS]]
    assert sorted(begun[:3]) == [0, 1, 2]
    assert begun[3:] == begun[:3]
    assert [ask.instance for ask in seen[::TURNS]] == list(range(6))


def test_all_users_begin_at_once_or_over_a_ramp(conversations: Trace) -> None:
    at_once = closed(conversations, 9, users=4).first()
    assert [ask.at_seconds for ask in at_once] == [0.0] * 4
    ramp = closed(conversations, 9, users=4, ramp_seconds=100.0).first()
    assert [ask.at_seconds for ask in ramp] == [0.0, 25.0, 50.0, 75.0]
    assert len(closed(conversations, 2, users=4).first()) == 2


@pytest.mark.parametrize("users", [1, 2, 5])
def test_just_so_many_requests_are_asked(conversations: Trace, users: int) -> None:
    assert len(asked(closed(conversations, 17, users=users))) == 17


def test_the_same_seed_gives_the_same_order_and_another_another(conversations: Trace) -> None:
    def order(seed: int) -> list[Ask]:
        return asked(closed(conversations, 40, users=2, seed=seed))

    assert order(0) == order(0)
    assert len({tuple(order(seed)) for seed in range(6)}) > 1


def test_users_of_a_trace_without_conversations_take_turns_in_its_order(requests: Trace) -> None:
    seen = asked(closed(requests, 4, users=2))
    assert [ask.row for ask in seen] == [0, 1, 2, 0]


def test_an_open_loop_asks_at_the_recorded_times(requests: Trace) -> None:
    slow = asked(OpenLoop(requests, 3), answer_seconds=1000.0)
    assert [(ask.at_seconds, ask.row) for ask in slow] == [(0.0, 0), (1.0, 1), (6.0, 2)]
    fast = asked(OpenLoop(requests, 2, speed=2.0))
    assert [ask.at_seconds for ask in fast] == [0.0, 0.5]
    assert len(asked(OpenLoop(requests, 100))) == 3


def test_an_open_loop_begins_conversations_at_random(conversations: Trace) -> None:
    loop = OpenLoop(conversations, 200, conversation_every_seconds=50.0, seed=1)
    seen = asked(loop)
    assert len(seen) == 200
    assert [ask.at_seconds for ask in seen] == sorted(ask.at_seconds for ask in seen)
    by_instance: dict[int, list[Ask]] = {}
    for ask in seen:
        by_instance.setdefault(ask.instance, []).append(ask)
    whole = [asks for asks in by_instance.values() if len(asks) == TURNS]
    assert len(whole) > 30
    for asks in whole:
        start = asks[0].at_seconds
        assert [ask.at_seconds - start for ask in asks] == pytest.approx([0, 100, 200, 300])
    starts = sorted(asks[0].at_seconds for asks in by_instance.values())
    assert starts[-1] / len(starts) == pytest.approx(50, rel=0.5)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"speed": 0.0}, "--speed"), ({"conversation_every_seconds": 5.0}, "--conversation-every")],
)
def test_what_does_not_go_with_recorded_times_is_refused(
    requests: Trace, settings: dict[str, float], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        OpenLoop(requests, 3, **settings)


@pytest.mark.parametrize(
    ("every", "named"),
    [(None, "--users"), (0.0, "--conversation-every"), (float("nan"), "--conversation-every")],
)
def test_conversations_need_a_distance(
    conversations: Trace, every: float | None, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        OpenLoop(conversations, 3, conversation_every_seconds=every)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"users": 0}, "--users"),
        ({"longest_think_seconds": -1.0}, "--longest-think"),
        ({"ramp_seconds": -1.0}, "--ramp"),
    ],
)
def test_a_closed_loop_that_cannot_be_is_refused(
    conversations: Trace, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        closed(conversations, 3, **settings)


def test_events_of_one_time_run_in_the_order_they_were_set() -> None:
    clock, seen = EventClock(), list[tuple[str, float]]()

    def note(name: str) -> None:
        seen.append((name, clock.now_seconds))
        if name == "b":
            clock.at(1.0, lambda: note("late"))  # its time has passed: at once

    clock.at(5.0, lambda: note("c"))
    clock.at(2.0, lambda: note("a"))
    clock.at(2.0, lambda: note("b"))
    clock.run()
    assert seen == [("a", 2.0), ("b", 2.0), ("late", 2.0), ("c", 5.0)]

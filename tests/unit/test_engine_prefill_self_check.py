"""The prefill controller's check of its own books, and of its ranks'."""

from __future__ import annotations

import numpy as np

from cp_shared_kv.engine.messages import Check, Checked, RankState
from cp_shared_kv.testing.recorded_controller import Controller


def test_pages_that_no_request_holds_are_a_problem() -> None:
    group = Controller()
    assert group.controller.problems() == []
    group.controller.scheduler.pool.admit(77, np.zeros(0, "V16"), 2)
    group.controller.on_server(Check(ticket=3))
    ((end, answer),) = group.sent
    assert end == "server"
    assert isinstance(answer, Checked)
    assert answer.ticket == 3
    (problem,) = answer.problems
    assert "rooms that hold pages are not the running ones" in problem


def test_what_is_wrong_at_a_rank_is_told_until_it_is_right_again() -> None:
    group = Controller()
    group.controller.on_rank(RankState(rank=1, open_rooms=[], problem="a write has no room"))
    assert group.controller.problems() == ["rank 1: a write has no room"]
    group.controller.on_rank(RankState(rank=1, open_rooms=[]))
    assert group.controller.problems() == []


def test_a_room_that_only_a_rank_still_has_is_a_problem_after_a_while() -> None:
    group = Controller()
    group.start(1)
    for _ in range(20):  # an open request is none
        group.controller.on_rank(RankState(rank=0, open_rooms=[1]))
    assert group.controller.problems() == []
    for count in range(11):
        assert group.controller.problems() == [], count
        group.controller.on_rank(RankState(rank=0, open_rooms=[1, 55]))
    assert group.controller.problems() == ["rank 0 holds room 55, which has long been over"]
    group.controller.on_rank(RankState(rank=1, open_rooms=[55]))
    group.controller.on_rank(RankState(rank=0, open_rooms=[1]))
    assert group.controller.problems() == []

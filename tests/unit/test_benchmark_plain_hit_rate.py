"""The plain LRU that the simulator's hit rates are compared with, on cases worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from benchmarks.micro.plain_hit_rate import PlainLru, recorded_order

from cp_shared_kv.planner.arrivals import ClosedLoop
from cp_shared_kv.planner.trace_files import read_trace
from cp_shared_kv.planner.trace_keys import PageKeys


def keys(*ids: int) -> PageKeys:
    return np.array(ids, np.int64).view("V8")


def test_a_prompt_finds_the_beginning_that_its_conversation_left() -> None:
    cache = PlainLru(10)
    assert [cache.ask(1, keys(1, 2, 3)), cache.ask(1, keys(1, 2, 9, 4))] == [0, 2]
    assert cache.ask(2, keys(1, 2, 9, 4)) == 0


def test_the_conversation_used_longest_ago_loses_its_tail_first() -> None:
    cache = PlainLru(6)
    cache.ask(1, keys(1, 2, 3))
    cache.ask(2, keys(4, 5, 6))
    cache.ask(1, keys(1, 2, 3, 7))  # one page too many: the end of conversation 2 goes
    assert cache.ask(2, keys(4, 5, 6)) == 2


def test_a_prompt_longer_than_the_pool_finds_nothing_and_drives_nothing_out() -> None:
    cache = PlainLru(3)
    cache.ask(1, keys(1, 2, 3))
    assert cache.ask(2, keys(4, 5, 6, 7)) == 0
    assert cache.ask(1, keys(1, 2, 3)) == 3


def test_requests_come_in_the_order_of_recorded_answers_and_thinking(tmp_path: Path) -> None:
    slow = [[0.0, 64, 1, [[1, 1]], 0, 50.0, 0.0], [0.0, 64, 1, [[1, 1]], 0, 1.0, 5.0]]
    fast = [[0.0, 64, 1, [[1, 1]], 0, 2.0, 3.0]] * 3
    path = tmp_path / "t.jsonl"
    path.write_text(
        "\n".join(json.dumps({"block_size": 64, "reqs": reqs}) for reqs in (slow, fast))
    )
    trace = read_trace(path)
    loop = ClosedLoop(trace, 5, users=2, longest_think_seconds=1800.0)
    rows = [row for row, _ in recorded_order(trace, loop)]
    assert sorted(rows[:2]) == [0, 2]
    assert rows[2:] == [3, 4, 1]  # 5 s, 10 s and 55 s after the start

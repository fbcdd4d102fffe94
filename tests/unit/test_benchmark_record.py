"""A benchmark's file holds what a reader needs to judge the figures and run it again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import Goal, Measurement, registered
from benchmarks.micro.interleave import interleaved
from benchmarks.record import judge, record

SAMPLES = {"ours": [2.0, 3.0, 9.0], "theirs": [1.0, 2.0, 3.0]}


def test_a_run_is_recorded_with_raw_samples_settings_versions_and_machine(tmp_path: Path) -> None:
    measurement = Measurement({"locs": 5}, SAMPLES, [Goal("ours", 2.0, against="theirs")])
    content = json.loads(record("example", measurement, tmp_path).read_text())
    assert content["benchmark"] == "example"
    assert content["config"] == {"locs": 5}
    assert content["samples_seconds"] == SAMPLES
    assert content["summary_seconds"]["ours"] == {"median": 3.0, "min": 2.0, "max": 9.0, "count": 3}
    assert set(content["versions"]) == {"python", "torch", "numpy", "cp-shared-kv"}
    assert content["machine"]["cores"] >= content["machine"]["cores_usable"] >= 1
    assert content["goals"][0]["met"] is True
    assert {"commit", "uncommitted_changes", "recorded_at"} <= set(content)


@pytest.mark.parametrize(
    ("goal", "figure", "low", "high", "met"),
    [
        (Goal("ours", 1.5, against="theirs"), 1.5, 1.5, 3.0, True),
        (Goal("ours", 1.4, against="theirs"), 1.5, 1.5, 3.0, False),
        (Goal("ours", 3.0), 3.0, 2.0, 9.0, True),
        (Goal("ours", 2.9), 3.0, 2.0, 9.0, False),
    ],
)
def test_a_goal_is_judged_by_medians(
    goal: Goal, figure: float, low: float, high: float, met: bool
) -> None:
    judged = judge(goal, SAMPLES)
    assert (judged["figure"], judged["min"], judged["max"], judged["met"]) == (
        figure,
        low,
        high,
        met,
    )


def test_functions_take_turns_and_the_first_round_is_not_measured() -> None:
    calls: list[str] = []
    progress: list[tuple[int, int]] = []
    seconds = interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        rounds=2,
        progress=lambda what, done, total: progress.append((done, total)),
    )
    assert calls == ["a", "b"] * 3
    assert [len(values) for values in seconds.values()] == [2, 2]
    assert progress[-1] == (6, 6)


def test_every_module_with_a_benchmark_is_found() -> None:
    assert "layout" in registered()

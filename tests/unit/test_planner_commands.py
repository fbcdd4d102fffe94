"""What the planner's commands have in common: narrow terminals, help by example, no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import Command


@pytest.mark.parametrize("columns", [30, 60, 120])
def test_a_narrow_terminal_cuts_no_figure(
    cpkv: Command, trace: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    plan = cpkv("plan", "glm-5.2", "--gpu", "h200")[1]
    for figure in ("140.40 GiB", "1,825,088", "1,866,240", "1,048,575"):
        assert figure in plan
    replay = cpkv("simulate", trace, "--users", "1", "--requests", "3", "--descriptors")[1]
    summary = cpkv("trace", "summarise", trace)[1]
    assert "…" not in plan + replay + summary


def test_a_trace_without_blocks_is_said_to_be_one(cpkv: Command, trace: Path) -> None:
    for command in (("simulate",), ("trace", "summarise"), ("trace", "validate")):
        users = ("--users", "1", "--requests", "1") if command == ("simulate",) else ()
        assert "no block ids" not in cpkv(*command, trace, *users)[1]
    path = trace.with_name("lengths.csv")
    path.write_text("arrival_seconds,prompt_tokens,output_tokens\n0,6400,5\n1,640,5\n")
    for command in (("simulate",), ("trace", "summarise"), ("trace", "validate")):
        code, out, _ = cpkv(*command, path)
        assert code == 0
        assert "no block ids, so nothing can be found in a cache" in " ".join(out.split())


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (
            "plan",
            ("cpkv plan glm-5.2 --gpu h200", "--kv-budget-gib", "layer split", "that of 141 GB"),
        ),
        ("simulate", ("cpkv simulate agentic.jsonl --users 16", "--pool-multipliers", "stated")),
        ("trace", ("validate", "summarise")),
    ],
)
def test_help_teaches_by_example_and_without_torch(command: str, shown: tuple[str, ...]) -> None:
    program = (
        "import sys; from cp_shared_kv.cli.app import run; "
        f"sys.argv = ['cpkv', '{command}', '--help']; run(); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for text in shown:
        assert text in done.stdout


def test_planning_and_simulating_need_no_torch(trace: Path) -> None:
    commands: list[list[Any]] = [
        ["plan", "glm-5.2", "--gpu", "h200"],
        ["simulate", str(trace), "--users", "1", "--requests", "2", "--descriptors"],
        ["trace", "summarise", str(trace)],
    ]
    for command in commands:
        program = (
            "import sys; from cp_shared_kv.cli.app import run; "
            f"sys.argv = ['cpkv', *{command}]; assert run() == 0; assert 'torch' not in sys.modules"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr

"""`cpkv trace` as a user runs it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]


def test_a_good_trace_is_said_to_be_one(cpkv: Command, trace: Path) -> None:
    code, out, _ = cpkv("trace", "validate", trace)
    assert code == 0
    assert out == "small.jsonl: agentic trace of 6 requests, nothing wrong\n"


def test_every_line_that_is_wrong_is_named_in_one_go(cpkv: Command, trace: Path) -> None:
    trace.write_text("x\n".join([trace.read_text().splitlines()[0] + "\n"] * 4))
    code, out, _ = cpkv("trace", "validate", trace)
    assert code == 1
    assert [line.split(":")[0] for line in out.splitlines()] == [
        "small.jsonl, line 2", "small.jsonl, line 4", "small.jsonl, line 6",
    ]  # fmt: skip
    code, out, _ = cpkv("trace", "validate", trace, "--most-errors", "1")
    assert code == 1
    assert out.splitlines()[1:] == ["... and 2 more"]


@pytest.mark.parametrize("command", ["validate", "summarise"])
def test_a_trace_that_is_not_there_ends_in_one_line(cpkv: Command, command: str) -> None:
    code, out, err = cpkv("trace", command, "nowhere.jsonl")
    assert code == 1
    assert out == ""
    assert err == "cpkv: the trace cannot be read: nowhere.jsonl (No such file or directory)\n"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("command", ["validate", "summarise"])
def test_a_trace_that_is_a_pipe_is_refused_and_not_waited_for(
    cpkv: Command, tmp_path: Path, command: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    code, out, err = cpkv("trace", command, tmp_path / "pipe")
    assert (code, out) == (1, "")
    assert err.startswith(
        f"cpkv: the trace is no regular file: {tmp_path / 'pipe'}; to change it: "
    )


def test_a_trace_is_summarised_as_tables_and_as_json(cpkv: Command, trace: Path) -> None:
    code, out, _ = cpkv("trace", "summarise", trace, "--lengths", "700")
    assert code == 0
    for text in ("conversations", "63.6%", "prompts longer than 700", "4 (66.7%)", "thinking"):
        assert text in out
    code, out, _ = cpkv("trace", "summarise", trace, "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["requests"], found["conversations"], found["distinct_blocks"]) == (6, 2, 24)

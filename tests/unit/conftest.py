"""What tests of commands share: a command run in this process, and a trace of a few requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cp_shared_kv.cli.app import run

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cpkv(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["cpkv", *map(str, arguments)])
        try:
            code = run()
        except SystemExit as stopped:  # how cyclopts ends on a flag that it refuses
            code = int(stopped.code or 0)
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    return call


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two agentic conversations of three requests each, of 10 to 12 pages."""
    reqs = [[20.0 * n, 64 * (10 + n), 30, [[1, 10 + n]], 0, 5.0, 2.0] for n in range(3)]
    path = tmp_path / "small.jsonl"
    path.write_text("\n".join([json.dumps({"block_size": 64, "reqs": reqs})] * 2))
    return path

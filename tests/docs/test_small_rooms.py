"""Small rooms: no Python file that git tracks is longer than CONTRIBUTING.md allows."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {"src", "tests", "benchmarks", "docs", "examples", "deploy"}
MOST_LINES = 400


def too_long(files: Iterable[Path]) -> dict[str, int]:
    """The files with more lines than a file may have, and how many they have."""
    lines = {str(file): len(file.read_text().splitlines()) for file in files}
    return {name: count for name, count in lines.items() if count > MOST_LINES}


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: git cannot say which files are the project's")
    command = ["git", "ls-files", "-z", "--", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    return [file for file in files if file.exists()]  # but not one that is removed just now


def test_no_python_file_is_longer_than_the_limit() -> None:
    files = tracked_files()
    assert {file.relative_to(ROOT).parts[0] for file in files} >= FOLDERS
    assert too_long(files) == {}


def test_one_line_too_many_is_found(tmp_path: Path) -> None:
    full, longer = tmp_path / "full.py", tmp_path / "longer.py"
    full.write_text("x = 1\n" * MOST_LINES)
    longer.write_text("x = 1\n" * (MOST_LINES + 1))
    assert too_long([full, longer]) == {str(longer): MOST_LINES + 1}


def test_contributors_are_told_this_limit() -> None:
    told = re.findall(
        r"lines are usual and (\d+) the limit", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert told == [str(MOST_LINES)]

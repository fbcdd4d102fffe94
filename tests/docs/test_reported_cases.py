"""The table of reported cases: every number once, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reported-cases.md").read_text()
ROWS = re.findall(r"^\| (\[P-.*?) \| (.*?) \| (.*) \|$", PAGE, re.M)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def numbers(row: tuple[str, str, str]) -> list[int]:
    return [int(number) for number in re.findall(r"\[P-(\d\d)\]\(https://\S+\)", row[0])]


def names_in(file: str) -> set[str]:
    """Test functions and classes of a file, and machines that are made tests by their name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_the_numbers_ascend_and_none_is_there_twice() -> None:
    listed = [number for row in ROWS for number in numbers(row)]
    assert listed == sorted(set(listed))
    assert len(listed) == len(re.findall(r"P-\d\d", PAGE)) > 50


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][1:5])
def test_a_case_names_tests_that_exist_or_why_there_can_be_none(row: tuple[str, str, str]) -> None:
    assert numbers(row)
    named = NAMED.findall(row[2])
    assert named or row[2].startswith("cannot occur: ")
    assert row[2].count("tests/") == len(named)
    for file, name in named:
        assert name.lower().startswith("test")
        assert name in names_in(file), f"{file} has no {name}"

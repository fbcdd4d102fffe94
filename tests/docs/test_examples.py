"""The examples run as a newcomer would run them, and print what they should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = {
    "ownership": """\
one rank: 384 tokens, the group: 1536
rank 0 keeps positions [0 4 8] in its physical pages [1 2 3]
rank 1 keeps positions [1 5 9] in its physical pages [1 2 3]
rank 2 keeps positions [2 6] in its physical pages [1 2]
rank 3 keeps positions [3 7] in its physical pages [1 2]
owners: [0 1 2 3 0 1 2 3 0 1]
rank 1's page 3 is logical page 10
mine: [ True] at [197]
""",
    "prefix_cache": """\
room 1 has pages [1 2 3 4], 0 of them cached: 4 free, 0 cached, 4 locked
room 1 is done: 5 free, 3 cached, 0 locked
room 2 has pages [1 2 3 4 5], 3 of them cached: 3 free, 0 cached, 5 locked
room 3 of 4 pages, now: None
room 3 of 9 pages, ever: 9 pages where the pool has 8
room 3 got in, 3 pages were evicted: 1 free, 0 cached, 7 locked
""",
    "shared_reads": """\
rank 0 stores 3 pages of 5 and reads all 20 tokens right: True
rank 1 stores 2 pages of 5 and reads all 20 tokens right: True
""",
    "transfer": """\
128 descriptors, 16384 bytes, every page once: True
the first eight pages came from ranks [0, 1, 2, 3, 0, 1, 2, 3]
16 descriptors, 16384 bytes, every page once: True
the first eight pages came from ranks [0, 1, 2, 3, 0, 1, 2, 3]
""",
}
WITHOUT_TORCH = ("ownership", "prefix_cache")


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("example", PRINTED)
def test_an_example_prints_what_it_shows(example: str) -> None:
    assert run(str(EXAMPLES / f"{example}.py")) == PRINTED[example]


def test_every_example_is_run_and_listed() -> None:
    examples = {path.stem for path in EXAMPLES.glob("*.py")}
    listed = re.findall(r"\[\w+\.py\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text())
    assert examples == set(PRINTED)
    assert sorted(examples) == sorted(listed)


@pytest.mark.parametrize("example", WITHOUT_TORCH)
def test_an_example_that_is_said_to_need_no_torch_does_not_import_it(example: str) -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); assert 'torch' not in sys.modules"
    assert run("-c", code, str(EXAMPLES / f"{example}.py")) == PRINTED[example]
    row = next(
        r for r in (EXAMPLES / "README.md").read_text().splitlines() if f"{example}.py)" in r
    )
    assert row.endswith("| no |")


@pytest.mark.parametrize("example", PRINTED)
def test_an_example_uses_the_library_alone(example: str) -> None:
    source = (EXAMPLES / f"{example}.py").read_text()
    layers = set(re.findall(r"^from cp_shared_kv\.(\w+)", source, re.M))
    assert layers <= {"layout", "memory", "reads", "transfer", "errors"}

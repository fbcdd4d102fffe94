"""The limit of open files of a process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import resource
from cp_shared_kv.engine.open_files import raise_open_files_limit

resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(raise_open_files_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def limits(soft: int, hard: int) -> list[int]:
    """What is returned, and the limits, of a process that had these."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(soft=soft, hard=hard)],
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(number) for number in ended.stdout.split()]


def test_the_soft_limit_becomes_the_hard_one() -> None:
    assert limits(256, 512) == [512, 512, 512]


def test_a_limit_that_is_reached_stays() -> None:
    assert limits(512, 512) == [512, 512, 512]

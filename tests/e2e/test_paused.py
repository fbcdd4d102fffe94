"""Whoever was stopped itself, and goes on, takes nobody else for silent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from cp_shared_kv.testing.serve_process import ServeProcess

pytestmark = pytest.mark.e2e

WATCHDOG_SECONDS = 3


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    made = ServeProcess(
        tmp_path_factory.mktemp("paused") / "log",
        "--prefill-groups=2",
        "--decode-workers=2",
        "--max-total-tokens=1024",
        f"--watchdog-timeout={WATCHDOG_SECONDS}",
    )
    yield made
    assert made.end() == 0


@pytest.mark.parametrize("everybody", [False, True], ids=["supervisor", "all processes"])
def test_no_unit_is_lost_when_the_supervisor_was_stopped(
    served: ServeProcess, everybody: bool
) -> None:
    children = served.children()
    assert len(children) == 7  # so that the same ones below mean something
    stopped = [served.process.pid, *(children if everybody else ())]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(WATCHDOG_SECONDS + 2)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    time.sleep(1)  # ten turns of the supervisor
    assert served.answer().status_code == 200
    assert served.children() == children
    assert "starts again" not in served.log()

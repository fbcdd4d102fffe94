"""Whoever was stopped itself, and goes on, takes nobody else for silent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cp_shared_kv.testing.client_load import body

pytestmark = pytest.mark.e2e

CPKV = str(Path(sys.executable).with_name("cpkv"))
WATCHDOG_SECONDS = 3


class Served:
    """`cpkv serve` with two groups and two decode workers."""

    def __init__(self, log: Path) -> None:
        self._log = log
        flags = ["--prefill-groups=2", "--decode-workers=2", "--max-total-tokens=1024"]
        flags.append(f"--watchdog-timeout={WATCHDOG_SECONDS}")
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [CPKV, "serve", "--model-path=demo", "--port=0", *flags],
                stderr=stderr,
            )
        deadline = time.monotonic() + 90
        while (found := re.search(r"at (http://\S+)/v1", log.read_text())) is None:
            assert time.monotonic() < deadline, log.read_text()
            assert self.process.poll() is None, log.read_text()
            time.sleep(0.1)
        self.url = found[1]

    def children(self) -> set[int]:
        """All processes of its units."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return {int(pid) for found in tasks for pid in found.read_text().split()}

    def answer(self) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/completions", json=body("hello", 4), trust_env=False, timeout=60
        )

    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("paused") / "log")
    yield made
    made.process.send_signal(signal.SIGTERM)
    assert made.process.wait(30) == 0


@pytest.mark.parametrize("everybody", [False, True], ids=["supervisor", "all processes"])
def test_no_unit_is_lost_when_the_supervisor_was_stopped(served: Served, everybody: bool) -> None:
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

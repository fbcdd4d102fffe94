"""`cpkv serve` as tests see it: a process of its own, with what it logs and whom it started."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from cp_shared_kv.testing.client_load import body

CPKV = str(Path(sys.executable).with_name("cpkv"))
START_SECONDS = 90


class ServeProcess:
    """Serves the demo model with `flags`; `enter` is a command that runs it. AssertionError, with
    its log, when it does not come up."""

    def __init__(self, log: Path, *flags: str, enter: Sequence[str] = ()) -> None:
        self._log = log
        command = [*enter, CPKV, "serve", "--model-path=demo", "--port=0", *flags]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)  # noqa: S603
        deadline = time.monotonic() + START_SECONDS
        while (found := re.search(r"at (http://\S+)/v1", self.log())) is None:
            assert time.monotonic() < deadline, self.log()
            assert self.process.poll() is None, self.log()
            time.sleep(0.1)
        self.url = found[1]

    def log(self) -> str:
        """What it and its processes have written to stderr."""
        return self._log.read_text()

    def children(self) -> dict[int, str]:
        """The processes that it has started, with their command lines."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for found in tasks for pid in found.read_text().split()]
        return {pid: Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids}

    def answer(self) -> httpx.Response:
        """To a short question."""
        return httpx.post(
            f"{self.url}/v1/completions", json=body("hello", 4), trust_env=False, timeout=60
        )

    def end(self) -> int:
        """Ask it to end; its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()

"""`cpkv join` as tests see it: a process on what counts as another host, and what its run shows."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cp_shared_kv.testing.client_load import body
from cp_shared_kv.testing.running_cluster import Running

CPKV = str(Path(sys.executable).with_name("cpkv"))
WAIT_SECONDS = 60
PROBE = "what does the other host answer? " * 20


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds; AssertionError that names it if it does not in time."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class SatelliteProcess:
    """A satellite at `host`; `enter` is a command that runs another there."""

    def __init__(
        self, main: Running, keys: Path, log: Path, host: str, enter: Sequence[str] = ()
    ) -> None:
        self.log = log
        address = main.cluster.join_address
        assert address is not None
        command = [CPKV, "join", address, f"--control-keys={keys}", f"--control-host={host}"]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen([*enter, *command], stderr=stderr)  # noqa: S603

    def says(self, words: str, times: int = 1) -> bool:
        """Whether it has logged this so often; it must live."""
        assert self.process.poll() is None, self.log.read_text()
        return self.log.read_text().count(words) >= times

    def worker(self) -> int:
        """The process of its decode worker. ValueError while it has none."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        (child,) = (pid for found in children for pid in found.read_text().split())
        return int(child)

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


def workers(main: Running) -> int:
    """Decode workers that answer."""
    lines = main.get("/metrics").text.splitlines()
    return int(float(next(x for x in lines if x.startswith("cpkv:decode_workers")).split()[-1]))


def pairs(main: Running, unit: str) -> int:
    """How often a group has come to pair with a decode worker, in all their lives."""
    return len(main.log_lines(f"can send to {unit}."))


def answers(main: Running, questions: int) -> list[str]:
    """To so many questions at once; a router that takes turns gives them to all decode workers."""

    def ask(number: int) -> str:
        answer = main.post(body(f"{number}: {PROBE}", 8))
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(questions) as pool:
        return list(pool.map(ask, range(questions)))

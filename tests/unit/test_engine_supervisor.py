"""The supervisor's own troubles: what the system refuses it, and clocks that jump."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
import zmq

from cp_shared_kv.engine import supervisor as module
from cp_shared_kv.engine.child import ChildReport
from cp_shared_kv.engine.endpoints import Endpoints
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.spawning import Spawner
from cp_shared_kv.engine.supervisor import Supervisor
from cp_shared_kv.engine.unit import Process, Unit

START_SECONDS = 2.0
WATCHDOG_SECONDS = 3.0
FIRST = Life("decode", 0, 1)


class FakeProcess:
    """One that runs until it is killed or `ends`."""

    def __init__(self) -> None:
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, _seconds: float | None = None) -> int:
        return self.returncode or 0

    def kill(self) -> None:
        self.returncode = -9 if self.returncode is None else self.returncode

    def send_signal(self, _number: int) -> None:
        self.kill()


class FakeSpawner:
    """Starts fake processes; the system refuses it some calls."""

    def __init__(self) -> None:
        self.refuse = {"spawn": 0, "clean_up": 0}
        self.lives: list[Life] = []
        self.processes: list[FakeProcess] = []
        self.cleaned: list[Life] = []

    def spawn(self, life: Life, now_seconds: float) -> Unit:
        self._may("spawn")
        self.lives.append(life)
        self.processes.append(FakeProcess())
        process = cast("Process", self.processes[-1])
        return Unit(life, {life.identity: process}, born_seconds=now_seconds)

    def clean_up(self, life: Life) -> None:
        self._may("clean_up")
        self.cleaned.append(life)

    def _may(self, what: str) -> None:
        if self.refuse[what]:
            self.refuse[what] -= 1
            raise OSError(errno.EMFILE, "Too many open files")


class FakeTime:
    """A clock that a test moves on, with each look or at once."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.step_seconds = 0.0

    def monotonic(self) -> float:
        self.now += self.step_seconds
        return self.now


class Watched:
    """A supervisor with one unit, which is ready."""

    def __init__(self, directory: Path) -> None:
        self.spawner = FakeSpawner()
        endpoints = Endpoints(directory)
        self.supervisor = Supervisor(
            endpoints,
            cast("Spawner", self.spawner),
            [FIRST],
            start_seconds=START_SECONDS,
            watchdog_seconds=WATCHDOG_SECONDS,
        )
        self.child = zmq.Context.instance().socket(zmq.DEALER)
        self.child.linger = 0
        self.child.setsockopt(zmq.IDENTITY, FIRST.identity)
        self.child.connect(endpoints.supervisor)
        self.supervisor.start()
        self.report()
        until(lambda: self.supervisor.is_ready("decode-0"))
        self.supervisor.start_is_over()

    def report(self) -> None:
        self.child.send(msgspec.msgpack.encode(ChildReport("ready")))

    def close(self) -> None:
        self.supervisor.stop()
        self.child.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    made = FakeTime()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(module, "LAST_WORDS_SECONDS", 0.01)
    return made


@pytest.fixture
def watched(clock: FakeTime, tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("refused", ["clean_up", "spawn"])
def test_what_the_system_refuses_is_told_once_and_tried_again(
    watched: Watched, clock: FakeTime, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    clock.step_seconds = 0.05
    watched.spawner.refuse[refused] = 3
    with caplog.at_level(logging.ERROR):
        watched.spawner.processes[0].kill()
        until(lambda: watched.spawner.lives == [FIRST, FIRST.next()])
    assert watched.supervisor.fatal is None
    assert watched.spawner.cleaned == [FIRST]
    told = [record.message for record in caplog.records]
    assert len([line for line in told if "Too many open files" in line]) == 1
    assert len([line for line in told if "decode-0 was killed by SIGKILL" in line]) == 1


def test_a_child_that_dies_of_a_signal_without_a_name_is_replaced_too(
    watched: Watched, clock: FakeTime, caplog: pytest.LogCaptureFixture
) -> None:
    clock.step_seconds = 0.05
    with caplog.at_level(logging.ERROR):
        watched.spawner.processes[0].returncode = -40
        until(lambda: watched.spawner.lives == [FIRST, FIRST.next()])
    assert watched.supervisor.fatal is None
    assert "decode-0 was killed by signal 40" in caplog.text


def test_it_pauses_before_it_tries_again(watched: Watched) -> None:
    """The clock stands: so nothing is tried a second time."""
    watched.spawner.refuse["clean_up"] = 3
    watched.spawner.processes[0].kill()
    until(lambda: watched.spawner.refuse["clean_up"] == 2)
    time.sleep(0.2)  # many turns
    assert watched.spawner.refuse["clean_up"] == 2


def test_a_child_that_does_not_become_ready_in_time_is_replaced(
    watched: Watched, clock: FakeTime, caplog: pytest.LogCaptureFixture
) -> None:
    watched.spawner.processes[0].kill()
    until(lambda: len(watched.spawner.lives) == 2)
    clock.step_seconds = 0.05  # and the next life says nothing
    until(lambda: len(watched.spawner.lives) == 3)
    assert "decode-0 did not become ready in 2 s (--start-timeout)" in caplog.text


def test_a_silent_child_is_replaced(watched: Watched, clock: FakeTime) -> None:
    clock.step_seconds = 0.1
    until(lambda: watched.spawner.lives == [FIRST, FIRST.next()])
    assert watched.spawner.processes[0].returncode == -9


def test_a_supervisor_that_was_stopped_itself_takes_no_child_for_silent(
    watched: Watched, clock: FakeTime
) -> None:
    for _ in range(3):
        clock.now += 100 * WATCHDOG_SECONDS
        time.sleep(0.1)  # many turns, in which the clock stands again
        watched.report()
        time.sleep(0.1)
    assert watched.spawner.lives == [FIRST]

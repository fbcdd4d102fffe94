"""Side calls of a simulated process: its other threads, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from cp_shared_kv.engine.side_calls import run
from cp_shared_kv.testing.world.process import Host, Process

T = TypeVar("T")
LOOK_SECONDS = 0.05
"""A thread of a stopped process looks so often whether that goes on."""


class VirtualThreads:
    """SideCalls that begin some time after they are asked for, and are heard of some time later.

    They go on while the process computes; not while it is stopped, nor after its death.
    """

    def __init__(self, host: Host, process: Process) -> None:
        self._host, self._process = host, process

    def submit(self, call: Callable[[], T], /) -> Future[T]:
        """Run `call` when the clock says so."""
        heard: Future[T] = Future()
        made: Future[T] = Future()
        made.add_done_callback(lambda _: self._later(lambda: run(made.result, heard)))
        self._later(lambda: run(call, made))
        return heard

    def _later(self, act: Callable[[], None]) -> None:
        self._host.clock.after(self._host.weather.call_seconds(), lambda: self._go_on(act))

    def _go_on(self, act: Callable[[], None]) -> None:
        if self._process.stopped:
            self._host.clock.after(LOOK_SECONDS, lambda: self._go_on(act))
        elif self._process.alive:
            act()

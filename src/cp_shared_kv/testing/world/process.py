"""One simulated process: it takes one thing after the other, and none while it is held."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.errors import CpkvError, ProtocolError
from cp_shared_kv.testing.world.clock import Clock
from cp_shared_kv.testing.world.plan import Plan
from cp_shared_kv.testing.world.trace import Trace
from cp_shared_kv.testing.world.weather import Weather

Act = Callable[[], None]


class Host(Protocol):
    """What every process needs of its world."""

    @property
    def plan(self) -> Plan: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def rng(self) -> random.Random: ...
    @property
    def trace(self) -> Trace: ...
    @property
    def weather(self) -> Weather: ...
    @property
    def seen(self) -> Counter[str]: ...
    def after(self, process: Process) -> None:
        """A process has dealt with something."""
        ...

    def message_refused(self, process: Process, error: ProtocolError) -> None:
        """A process refuses what it was sent."""
        ...

    def ended(self, process: Process, reason: str) -> None:
        """A process ends by itself."""
        ...


class Link(Protocol):
    """The outgoing direction of a link."""

    def cut(self) -> None:
        """The sender has died."""
        ...


class SiblingGoneError(CpkvError):
    """A process cannot go on because another of its unit is gone; it ends as well."""


class Process:
    """What a process has been given and has not taken yet waits in its sockets, in order.

    It is held while it computes (`busy`) and while it is stopped by a signal.
    """

    def __init__(self, world: Host, life: Life, name: str) -> None:
        self._host, self.life, self.name = world, life, name
        self.alive = True
        self.stopped = False
        self._well_since = world.clock.now_seconds
        self.busy = False
        self.outgoing: list[Link] = []
        self._inbox: deque[Act] = deque()
        self._acting = False

    def take(self, act: Act) -> None:
        """Something has come; it is dealt with as soon as the process gets to it."""
        if self.alive:
            self._inbox.append(act)
            self._work()

    def begin(self, seconds: float, end: Act) -> None:
        """Compute for so long; nothing else is taken before `end`."""
        self.busy = True
        self._host.clock.after(seconds, lambda: self.finish(end))

    def finish(self, end: Act) -> None:
        """The end of what made it busy; `end` comes before all that has arrived meanwhile."""
        self.busy = False
        if self.alive:
            self._inbox.appendleft(end)
            self._work()

    @property
    def well_seconds(self) -> float:
        """For how long it has been neither dead, nor stopped, nor starting."""
        well = self.alive and not self.stopped
        return self._host.clock.now_seconds - self._well_since if well else 0.0

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT."""
        self.stopped = False
        self._well_since = self._host.clock.now_seconds
        self._work()

    def die(self) -> None:
        """SIGKILL: nothing more is taken or sent; part of what was sent may not arrive."""
        if self.alive:
            self.alive = False
            self._inbox.clear()
            for channel in self.outgoing:
                channel.cut()

    def after_each(self) -> None:
        """What the process's loop does after whatever it has taken."""

    def check_books(self) -> None:
        """InvariantError if its books do not balance."""

    def _work(self) -> None:
        while self._inbox and self.alive and not (self.stopped or self.busy or self._acting):
            act = self._inbox.popleft()
            self._acting = True
            try:
                act()
                self.after_each()
            except SiblingGoneError as error:
                self._host.ended(self, str(error))
            except ProtocolError as error:
                self._host.message_refused(self, error)
            finally:
                self._acting = False
            self._host.after(self)

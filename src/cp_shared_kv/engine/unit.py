"""One life of a unit as its supervisor sees it: its processes, and whether they go on."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import dataclass, field

from cp_shared_kv.engine.lives import Life

Process = subprocess.Popen[bytes]


@dataclass
class Unit:
    """The processes of one life, and what they have told the supervisor."""

    life: Life
    processes: dict[bytes, Process]
    """By their identity on the supervisor's link."""
    born_seconds: float
    listens: bool = False
    """Its main process takes news."""
    reachable: bool = False
    address: str = ""
    """Where its main process is reached from other hosts; empty if it is not."""
    over: str | None = None
    """Why it is over: its processes are reaped, and what it left is being removed."""
    condemned: str | None = None
    """Why it is to be replaced, although it lives."""
    ready: set[bytes] = field(default_factory=set[bytes])
    failed: dict[bytes, str] = field(default_factory=dict[bytes, str])
    heard_seconds: float = 0.0
    """When its main process was last heard of."""

    @property
    def is_ready(self) -> bool:
        """Whether every process has said that its work can begin."""
        return self.processes.keys() <= self.ready

    @property
    def watched(self) -> bool:
        """Whether its main process is to say again and again that it lives."""
        return self.life.identity in self.ready & self.processes.keys()

    def ended(self) -> bytes | None:
        """A process that is no longer running: one that said why, if any did."""
        gone = [name for name, process in self.processes.items() if process.poll() is not None]
        return min(gone, key=lambda name: name not in self.failed, default=None)

    def how_it_ended(self, identity: bytes) -> str:
        """What became of an ended process, for people."""
        name = process_name(identity)
        if identity in self.failed:
            what = "go on" if identity in self.ready else "start"
            return f"{name} could not {what}: {self.failed[identity]}"
        return f"{name} {_how_it_ended(self.processes[identity].returncode)}"

    def overdue(
        self, now_seconds: float, *, start_seconds: float, watchdog_seconds: float
    ) -> str | None:
        """Why it is to be ended although it runs: silent for too long, given up, or not ready in
        time. None while it may go on."""
        silence = now_seconds - self.heard_seconds
        if self.watched and silence > watchdog_seconds:
            return f"{self.life.unit} gave no sign of life for {silence:.0f} s (--watchdog-timeout)"
        if self.condemned is not None:
            return f"{self.life.unit} was given up: {self.condemned}"
        if not self.is_ready and now_seconds - self.born_seconds > start_seconds:
            waiting = ", ".join(sorted(map(process_name, self.processes.keys() - self.ready)))
            return f"{waiting} did not become ready in {start_seconds:.0f} s (--start-timeout)"
        return None


def process_name(identity: bytes) -> str:
    """A process's name without the number of its life: `prefill-0/rank-1`."""
    life, slash, rank = identity.decode().partition("/")
    return Life.parse(life).unit + slash + rank


def _how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:  # most real-time signals have no name
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"

"""Start and stop the processes of one unit: a prefill group, a decode worker or the server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cp_shared_kv.engine.config import API_KEY_VARIABLE
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.memory.segment_names import SHARED_MEMORY_DIRECTORY

SERVER_MODULE = "cp_shared_kv.server.process"
CHILD_MODULE = "cp_shared_kv.engine.child_main"
STOP_SECONDS = 5.0
"""How long children may take to leave after SIGTERM before they are killed."""

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
        return f"{name} {how_it_ended(self.processes[identity].returncode)}"


class Spawner:
    """Starts the units of one run. `listener` is the server's bound socket, `log_file` takes what
    the children would write to stderr; `api_key` is for the server, and nobody else is given it."""

    def __init__(
        self,
        spec: RunSpec,
        run_file: Path,
        listener: socket.socket | None,
        log_file: Path | None,
        *,
        api_key: str | None = None,
    ) -> None:
        self._spec = spec
        self._run_file = str(run_file)
        # A copy that stays open: a server that starts again listens on the same port.
        self._listener_fd = None if listener is None else os.dup(listener.fileno())
        self._log_file = log_file
        self._api_key = api_key

    @property
    def has_server(self) -> bool:
        """Whether this run has a server process."""
        return self._listener_fd is not None

    def spawn(self, life: Life, now_seconds: float) -> Unit:
        """Start all processes of a life, born now. OSError if one cannot be started; then none
        runs."""
        processes: dict[bytes, Process] = {}
        try:
            self._start_all(life, processes)
        except OSError:
            kill_processes(processes.values())
            raise
        return Unit(life, processes, born_seconds=now_seconds)

    def _start_all(self, life: Life, processes: dict[bytes, Process]) -> None:
        if life.role == "server":
            assert self._listener_fd is not None
            arguments = [SERVER_MODULE, self._run_file, str(life), str(self._listener_fd)]
            processes[life.identity] = self._start_server(arguments, self._listener_fd)
        else:
            if life.role == "prefill":
                for rank in range(self._spec.limits.cp_size):
                    processes[life.rank_identity(rank)] = self._start(
                        [CHILD_MODULE, self._run_file, str(life), str(rank)]
                    )
            processes[life.identity] = self._start([CHILD_MODULE, self._run_file, str(life)])

    def clean_up(self, life: Life) -> None:
        """Remove what a life that is over left in shared memory. OSError if that fails."""
        prefix = self._spec.region_prefix(life)
        for name in os.listdir(SHARED_MEMORY_DIRECTORY):  # glob would take a failure for nothing
            if name.startswith(prefix):
                (Path(SHARED_MEMORY_DIRECTORY) / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Give up the server's port."""
        if self._listener_fd is not None:
            os.close(self._listener_fd)
            self._listener_fd = None

    def _start_server(self, module: list[str], listener_fd: int) -> Process:
        secrets = {} if self._api_key is None else {API_KEY_VARIABLE: self._api_key}
        return self._start(module, (listener_fd,), secrets)

    def _start(
        self,
        module: list[str],
        pass_fds: tuple[int, ...] = (),
        secrets: Mapping[str, str] | None = None,
    ) -> Process:
        environment = {
            **{name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE},
            **(secrets or {}),
            # N ranks share this host's cores; each computes with one thread.
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        log = None if self._log_file is None else self._log_file.open("ab")
        try:
            return subprocess.Popen(  # noqa: S603  (our own module and arguments)
                [sys.executable, "-m", *module],
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=log,
                pass_fds=pass_fds,
                # Ctrl-C reaches the supervisor alone, which then stops its children in order.
                start_new_session=True,
            )
        finally:
            if log is not None:
                log.close()


def process_name(identity: bytes) -> str:
    """A process's name without the number of its life: `prefill-0/rank-1`."""
    life, slash, rank = identity.decode().partition("/")
    return Life.parse(life).unit + slash + rank


def stop_processes(processes: Iterable[Process]) -> None:
    """SIGTERM to all, SIGKILL to those that take too long; returns when all are reaped."""
    chosen = list(processes)
    for process in chosen:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    for process in chosen:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def kill_processes(processes: Iterable[Process]) -> None:
    """SIGKILL to all, also to stopped ones; returns when all are reaped."""
    chosen = list(processes)
    for process in chosen:
        process.kill()
    for process in chosen:
        process.wait()


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:  # most real-time signals have no name
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"

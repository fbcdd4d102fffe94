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
from pathlib import Path

from cp_shared_kv.engine.config_values import API_KEY_VARIABLE
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.unit import Process, Unit
from cp_shared_kv.memory.segment_names import SHARED_MEMORY_DIRECTORY

SERVER_MODULE = "cp_shared_kv.server.process"
CHILD_MODULE = "cp_shared_kv.engine.child_main"
STOP_SECONDS = 5.0
"""How long children may take to leave after SIGTERM before they are killed."""


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

"""Start, watch and stop the processes of one host."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zmq

from cp_shared_kv.engine.child import ChildReport
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.model_spec import describe_model
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.sizing import (
    check_shared_memory,
    free_memory_bytes,
    resolve_limits,
)
from cp_shared_kv.errors import InvariantError, StartStoppedError, StartupError
from cp_shared_kv.memory.buffers import SHARED_MEMORY_DIRECTORY

START_SECONDS = 180.0
"""How long the slowest child may take to load its weights and report."""
STOP_SECONDS = 5.0
"""How long children may take to leave after SIGTERM before they are killed."""
DRAIN_POLL_SECONDS = 0.05
SERVER = "server-0"
MAX_IPC_PATH_BYTES = 107
SERVER_MODULE = "cp_shared_kv.server.process"
CHILD_MODULE = "cp_shared_kv.engine.child_main"

Progress = Callable[[str, int, int], None]
"""Called with what is going on, how much of it is done, and of how much."""

logger = logging.getLogger("cp_shared_kv")


def no_progress(_what: str, _done: int, _total: int) -> None:
    """For callers that show nothing."""


class Cluster:
    """The processes of one prefill group, one decode worker and one server.

    A context manager: leaving it stops every child and removes what they left in /dev/shm.
    `listener` is the server's bound socket (None runs no server); `log_file` takes what the
    children would write to stderr; `stop_asked` ends a start with `StartStoppedError`. Raises
    `StartupError`, `ConfigError`, `CapacityError` or `CheckpointError` before or while starting,
    with nothing left running.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        listener: socket.socket | None = None,
        log_file: Path | None = None,
        stop_asked: threading.Event | None = None,
        on_progress: Progress = no_progress,
    ) -> None:
        self.config = config
        self._listener = listener
        self._log_file = log_file
        self._stop_asked = stop_asked
        self._on_progress = on_progress
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._run_dir: Path | None = None
        model = describe_model(config)
        self.limits: EngineLimits = resolve_limits(
            config, model.pool_spec, model.context_length, free_bytes=free_memory_bytes()
        )
        check_shared_memory(self.limits)
        self._model = model
        self._spec: RunSpec | None = None

    @property
    def spec(self) -> RunSpec:
        """What the children were told. InvariantError before the start."""
        if self._spec is None:
            raise InvariantError("a cluster was asked for its run before its start")
        return self._spec

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        self._run_dir = _make_run_dir()
        self._spec = RunSpec(
            run_id=secrets.token_hex(4),
            run_dir=str(self._run_dir),
            supervisor_pid=os.getpid(),
            config=self.config.as_plain(),
            limits=self.limits,
            page_layout=self._model.page_layout,
            model_fingerprint=self._model.fingerprint,
            vocab_size=self._model.config.vocab_size,
            eos_token_ids=self._model.config.eos_token_ids,
        )
        run_file = self._spec.save()
        inbox = zmq.Context.instance().socket(zmq.PULL)
        inbox.linger = 0
        inbox.bind(self._spec.endpoints.supervisor)
        try:
            for rank in range(self.config.cp_size):
                self._spawn(f"rank-{rank}", [CHILD_MODULE, "rank", str(run_file), str(rank)])
            self._spawn("decode-0", [CHILD_MODULE, "decode", str(run_file), "0"])
            self._spawn("prefill-0", [CHILD_MODULE, "prefill", str(run_file), "0"])
            if self._listener is not None:
                descriptor = self._listener.fileno()
                self._spawn(
                    SERVER,
                    [SERVER_MODULE, str(run_file), str(descriptor)],
                    pass_fds=(descriptor,),
                )
            self._await_ready(inbox)
        finally:
            inbox.close()

    def _spawn(self, name: str, module: list[str], pass_fds: tuple[int, ...] = ()) -> None:
        environment = {
            **os.environ,
            # N ranks share this host's cores; each computes with one thread.
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        log = None if self._log_file is None else self._log_file.open("ab")
        self._children[name] = subprocess.Popen(  # noqa: S603  (our own module and arguments)
            [sys.executable, "-m", *module],
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=log,
            pass_fds=pass_fds,
            # Ctrl-C reaches the supervisor alone, which then stops its children in order.
            start_new_session=True,
        )
        if log is not None:
            log.close()

    def _await_ready(self, inbox: zmq.Socket[bytes]) -> None:
        waiting = set(self._children)
        deadline = time.monotonic() + START_SECONDS
        while waiting:
            self._on_progress(
                "starting processes", len(self._children) - len(waiting), len(self._children)
            )
            if inbox.poll(timeout=100):
                told = msgspec.msgpack.decode(inbox.recv(), type=ChildReport)
                if not told.ready:
                    raise StartupError(f"{told.name} could not start: {told.reason}")
                waiting.discard(told.name)
                continue
            if self._stop_asked is not None and self._stop_asked.is_set():
                raise StartStoppedError("stopped while starting")
            # Also those that have reported: one that dies leaves the others waiting for it.
            lost = self.lost_child()
            if lost is not None and not inbox.poll(timeout=200):
                raise StartupError(f"{lost} before all processes were ready")
            if time.monotonic() > deadline:
                raise StartupError(
                    "processes did not become ready in time",
                    value=", ".join(sorted(waiting)),
                    allowed=f"{START_SECONDS:.0f} seconds",
                )
        self._on_progress("starting processes", len(self._children), len(self._children))

    def lost_child(self) -> str | None:
        """Name and end of a child that is no longer running, or None while all are."""
        for name, child in self._children.items():
            code = child.poll()
            if code is not None:
                return f"{name} {_how_it_ended(code)}"
        return None

    def pid(self, name: str) -> int:
        """Process id of a child such as `rank-0`, `decode-0`, `prefill-0`, `server-0`."""
        return self._children[name].pid

    def stop_child(self, name: str) -> None:
        """Stop one child and no longer expect it (the replay tool takes the controller's place)."""
        _stop([self._children.pop(name)])

    def drain(self, hurry: threading.Event) -> None:
        """Let the server end its answers under way: up to --shutdown-timeout, or until `hurry` is
        set or a child is lost. To call before `stop`, which waits for nobody's answer."""
        server = self._children.get(SERVER)
        if server is None:
            return
        server.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.config.shutdown_timeout + STOP_SECONDS
        while self.lost_child() is None and time.monotonic() < deadline:
            if hurry.wait(DRAIN_POLL_SECONDS):
                return

    def stop(self) -> None:
        """Stop every child and remove the run's files. Safe to call twice."""
        _stop(list(self._children.values()))
        self._children.clear()
        if self._run_dir is None:
            return
        # Regions are unlinked once mapped; one that a killed child left half-way goes here.
        if self._spec is not None:
            for region in Path(SHARED_MEMORY_DIRECTORY).glob(f"cpkv-{self._spec.run_id}-*"):
                region.unlink(missing_ok=True)
        shutil.rmtree(self._run_dir, ignore_errors=True)
        self._run_dir = None


def _make_run_dir() -> Path:
    """A private directory for this run's sockets and files."""
    try:
        run_dir = Path(tempfile.mkdtemp(prefix="cpkv-"))
    except OSError as error:
        raise StartupError(
            f"cannot make the run's directory: {error}", change="set TMPDIR to a writable directory"
        ) from error
    longest = len(str(run_dir)) + len("/supervisor.sock")
    if longest > MAX_IPC_PATH_BYTES:
        run_dir.rmdir()
        raise StartupError(
            "the temporary directory's path is too long for sockets",
            value=f"{longest} bytes",
            allowed=f"{MAX_IPC_PATH_BYTES} bytes, with the run's name",
            change="set TMPDIR to a shorter path",
        )
    return run_dir


def _stop(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        with suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"

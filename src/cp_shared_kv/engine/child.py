"""Birth and death of a child process, and its link to the supervisor.

A child reports that it is ready, or in one line why it is not, and then that it lives. It dies
with its supervisor and leaves interrupts to it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import zmq
from msgspec import Meta

from cp_shared_kv.engine.codecs import FROM_SUPERVISOR, FromSupervisor
from cp_shared_kv.engine.open_files import raise_open_files_limit
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.errors import CpkvError

PR_SET_PDEATHSIG = 1
EXIT_REFUSED = 3
"""Exit code of a child that said why it could not go on."""
ALIVE_SECONDS = 1.0
"""A child with a link says so often that it lives."""

ChildState = Literal["started", "reachable", "ready", "alive", "gave_up", "failed"]
"""reachable: others may connect to its inbox; ready: its work can begin; gave_up: it cannot work
with `peer`, a life on another host."""

logger = logging.getLogger("cp_shared_kv")


class ChildReport(msgspec.Struct, frozen=True):
    """What a child tells its supervisor."""

    state: ChildState
    reason: str = ""
    address: Annotated[str, Meta(max_length=200)] = ""
    """Where it is reached from other hosts."""
    peer: Annotated[str, Meta(max_length=40)] = ""


class SupervisorLink:
    """A child's link to the supervisor: reports out, news of other processes in."""

    def __init__(self, spec: RunSpec, identity: bytes) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.linger = 1000
        self.socket.connect(spec.endpoints.supervisor)
        self._next_alive_seconds = 0.0

    def report(
        self, state: ChildState, reason: str = "", *, address: str = "", peer: str = ""
    ) -> None:
        """Tell the supervisor; does not wait."""
        self.socket.send(msgspec.msgpack.encode(ChildReport(state, reason, address, peer)))

    def report_alive(self) -> None:
        """Say so, if it is time to."""
        now = time.monotonic()
        if now >= self._next_alive_seconds:
            self._next_alive_seconds = now + ALIVE_SECONDS
            self.report("alive")

    def receive(self) -> FromSupervisor:
        """The next message; blocks until there is one."""
        return FROM_SUPERVISOR.decode(self.socket.recv())

    def close(self) -> None:
        """Close, waiting at most a second for what was reported to leave."""
        self.socket.close()


def set_up_logging(name: str, level: str) -> None:
    """Log to stderr, one line an event, with time and process name."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"[%(asctime)s {name}] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )


def begin(spec: RunSpec, name: str) -> None:
    """What every child does first; `name` is what its log lines have. It makes files for its user
    alone, and lives no longer than its supervisor."""
    os.umask(0o077)
    die_with_supervisor(spec)
    set_up_logging(name, spec.config["log_level"])
    raise_open_files_limit()


def die_with_supervisor(spec: RunSpec) -> None:
    """Ask the kernel to kill this process when its supervisor ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # An orphan's new parent is any subreaper, and a supervisor may itself be process 1.
    if os.getppid() != spec.supervisor_pid:
        sys.exit(EXIT_REFUSED)  # it was gone before the request took effect


def run_child(spec: RunSpec, identity: bytes, body: Callable[[SupervisorLink], None]) -> int:
    """Run a child's body; every expected failure becomes one reported line."""
    link = SupervisorLink(spec, identity)
    try:
        body(link)
    except CpkvError as error:
        link.report("failed", str(error))
        return EXIT_REFUSED
    except Exception as error:
        logger.exception("%s failed", identity.decode())
        link.report("failed", f"{type(error).__name__}: {error}")
        return 1
    finally:
        link.close()
    return 0

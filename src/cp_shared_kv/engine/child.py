"""Birth and death of a child process.

A child reports to the supervisor that it is ready, or in one line why it is not. It dies with its
supervisor and leaves interrupts to it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable

import msgspec
import zmq

from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.errors import CpkvError

PR_SET_PDEATHSIG = 1
EXIT_REFUSED = 3
"""Exit code of a child that said why it could not go on."""

logger = logging.getLogger("cp_shared_kv")


class ChildReport(msgspec.Struct, frozen=True):
    """What a child tells its supervisor: ready, or failed with a reason."""

    name: str
    ready: bool
    reason: str = ""


def report(spec: RunSpec, name: str, *, ready: bool, reason: str = "") -> None:
    """Send one report to the supervisor; waits at most a second for it to leave."""
    socket = zmq.Context.instance().socket(zmq.PUSH)
    socket.linger = 1000
    socket.connect(spec.endpoints.supervisor)
    socket.send(msgspec.msgpack.encode(ChildReport(name, ready, reason)))
    socket.close()


def set_up_logging(name: str, level: str) -> None:
    """Log to stderr, one line an event, with time and process name."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"[%(asctime)s {name}] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )


def die_with_supervisor(spec: RunSpec) -> None:
    """Ask the kernel to kill this process when its supervisor ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # An orphan's new parent is any subreaper, and a supervisor may itself be process 1.
    if os.getppid() != spec.supervisor_pid:
        sys.exit(EXIT_REFUSED)  # it was gone before the request took effect


def run_child(name: str, spec: RunSpec, body: Callable[[], None]) -> int:
    """Run a child's body; every expected failure becomes one reported line."""
    try:
        body()
    except CpkvError as error:
        report(spec, name, ready=False, reason=str(error))
        return EXIT_REFUSED
    except Exception as error:
        logger.exception("%s failed", name)
        report(spec, name, ready=False, reason=f"{type(error).__name__}: {error}")
        return 1
    return 0

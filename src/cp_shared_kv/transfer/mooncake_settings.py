"""The settings that Mooncake's Transfer Engine reads from the environment of its process.

Read at each use, and the same for all engines of a process. So they are checked before one is made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from cp_shared_kv.errors import StartupError

MAX_IN_FLIGHT = 256
"""Transfers to one peer at a time. The engine queues as many as it is set up for, keeps a few
more for a second, and fails the rest while those it took go on."""

FOREVER_SECONDS = str(1 << 30)
FORCE_TCP, NVLINK = "MC_FORCE_TCP", "MC_INTRANODE_NVLINK"
REQUIRED_SETTINGS: Mapping[str, str] = {
    # A transfer ends when the peer has applied or refused it, or its connection is gone. The
    # engine's own limits end it while its bytes are still on their way, so there are none.
    "MC_TCP_STATUS_TIMEOUT_SEC": FOREVER_SECONDS,
    "MC_TCP_PROGRESS_TIMEOUT_SEC": FOREVER_SECONDS,
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(4 * MAX_IN_FLIGHT),
    # With 1, bytes count as landed when they leave the sender.
    "MC_TCP_PROTO": "2",
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    # An adapter that the engine finds would otherwise be used, whatever it is told.
    FORCE_TCP: "1",
}
FORBIDDEN_SETTINGS = ("MC_SLICE_TIMEOUT", "MC_USE_TENT", "MC_LEGACY_RPC_PORT_BINDING")


def set_up(*, on_gpu: bool) -> bool:
    """Make the environment one that the transport can rely on, for memory of a GPU or of the host.

    True: between GPUs of this host over NVLink, which MC_INTRANODE_NVLINK=1 asks for. False: over
    TCP. StartupError for settings that contradict that.
    """
    for name in FORBIDDEN_SETTINGS:
        if name in os.environ:
            raise StartupError(
                f"the environment sets {name}", value=os.environ[name], change=f"unset {name}"
            )
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    if NVLINK in os.environ:
        _check_nvlink(os.environ[NVLINK], on_gpu)
        return True
    for name, value in REQUIRED_SETTINGS.items():
        if os.environ.setdefault(name, value) != value:
            raise StartupError(
                f"the environment sets {name}",
                value=os.environ[name],
                allowed=f"{value}, on which the transport relies",
                change=f"unset {name}",
            )
    return False


def _check_nvlink(value: str, on_gpu: bool) -> None:
    if value != "1":  # to the engine, 0 is as good
        raise StartupError(
            f"the environment sets {NVLINK}",
            value=value,
            allowed="1, or not set at all",
            change=f"unset {NVLINK} for TCP",
        )
    if not on_gpu:
        raise StartupError(
            f"the environment sets {NVLINK}, which moves nothing but memory of GPUs",
            change=f"unset {NVLINK}, or add --device cuda",
        )
    if FORCE_TCP in os.environ:
        raise StartupError(
            f"the environment sets both {NVLINK} and {FORCE_TCP}",
            change=f"unset {FORCE_TCP} for NVLink, or {NVLINK} for TCP",
        )

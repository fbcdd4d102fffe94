"""The one door to Mooncake's Transfer Engine: how it is loaded, set up, and asked.

Only what can be asked safely has a way through here (docs/adr/0012-mooncake.md). Nothing blocks
but the first contact with a peer, nothing waits on a processor, and a batch id never leaves: an
unknown one crashes the process, and one that has ended may belong to another transfer.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from ctypes import py_object, pythonapi
from functools import partial
from typing import Any, Protocol, cast

from cp_shared_kv.errors import StartupError
from cp_shared_kv.transfer.mooncake_settings import NVLINK, set_up

GATE_SECONDS = 0.5

_DEBIAN_PACKAGES = {
    "libibverbs.so": "libibverbs1",
    "libnuma.so": "libnuma1",
    "libcurl.so": "libcurl4",
}
_NO_BATCH = (0, -1, (1 << 64) - 1)
_LANDED, _FAILED = 1, -1


class _WheelEngine(Protocol):
    """The methods of `mooncake.engine.TransferEngine` that are called, as far as they are typed."""

    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, nbytes: int) -> int: ...
    def transfer_submit_write(self, peer: str, local: int, remote: int, nbytes: int) -> int: ...
    def batch_transfer_async_read(
        self, peer: str, local: list[int], remote: list[int], nbytes: list[int]
    ) -> int: ...
    def transfer_check_status(self, batch: int) -> int: ...


class Transfer:
    """One range on its way. Its two addresses must stay valid until it has ended."""

    def __init__(self, check_status: Callable[[], int]) -> None:
        self._check_status = check_status
        self._landed: bool | None = None

    def landed(self) -> bool | None:
        """True: the peer has applied every byte. False: it has not, and no byte can land any
        more, as long as nothing but the two processes can end their connection. None: neither,
        yet.
        """
        if self._landed is None:
            status = self._check_status()
            if status in (_LANDED, _FAILED):  # the batch is freed with this answer: never ask again
                self._landed = status == _LANDED
        return self._landed


class MooncakeEngine:
    """A Transfer Engine that speaks TCP from `host`. Not for several threads at a time.

    It serves the memory that was exposed to whoever reaches its two ports, which it opens on all
    addresses of the machine. `on_gpu` lets memory of GPUs be used too; then, if the environment
    asks for it, bytes go `over_nvlink` to plain cudaMalloc memory of this host's GPUs, and to no
    other. StartupError where the wheel cannot be loaded or started, or is a build that cannot do
    this, and where the environment sets what it relies on to something else.
    """

    def __init__(self, host: str, *, on_gpu: bool = False) -> None:
        self.over_nvlink = set_up(on_gpu=on_gpu)
        engine = _load(on_gpu, self.over_nvlink)
        protocol = "nvlink_intra" if self.over_nvlink else "tcp"
        status = engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if status:
            raise StartupError(
                "Mooncake's Transfer Engine did not start",
                value=f"status {status} on {host}",
                change="free ports between 15000 and 17000; its log is on standard error",
            )
        self._engine = engine
        self._gate = threading.Lock()
        self.endpoint = f"{host}:{engine.get_rpc_port()}"
        """What peers reach it by."""
        _engines.add(self)

    def expose(self, address: int, nbytes: int) -> int:
        """Serve memory to peers; it must stay valid as long as the engine. 0, or why not."""
        return self._engine.register_memory(address, nbytes)

    def write(self, peer: str, local: int, remote: int, nbytes: int) -> Transfer | None:
        """Send bytes at `local` to `remote` at the endpoint `peer`. None: nothing was sent.

        The first contact with a peer waits for its answer, up to a minute, without the GIL.
        The addresses are not checked here: a wrong `local` one would be read.
        """
        with self._gate:
            batch = self._engine.transfer_submit_write(peer, local, remote, nbytes)
        return self._transfer(batch)

    def read(self, peer: str, local: int, remote: int, nbytes: int) -> Transfer | None:
        """Fetch bytes at `remote` of the endpoint `peer` to `local`. As `write`."""
        with self._gate:
            batch = self._engine.batch_transfer_async_read(peer, [local], [remote], [nbytes])
        return self._transfer(batch)

    def _transfer(self, batch: int) -> Transfer | None:
        return None if batch in _NO_BATCH else Transfer(partial(self._check_status, batch))

    def _check_status(self, batch: int) -> int:
        with self._gate:
            return self._engine.transfer_check_status(batch)

    def shut_the_gate(self) -> None:
        """Let no thread enter the wheel again: one that came back from it while the interpreter
        goes down would take the process with it. One that waits for a first contact stays there.
        """
        self._gate.acquire(timeout=GATE_SECONDS)

    def outlive_the_process(self) -> None:
        """Never destroy the engine: what its destructor waits for is not in this process."""
        pythonapi.Py_IncRef(py_object(self._engine))


def _load(on_gpu: bool, over_nvlink: bool) -> _WheelEngine:
    try:
        import mooncake.engine as wheel  # pyright: ignore
    except ModuleNotFoundError as error:
        raise StartupError(
            f"Mooncake's Transfer Engine is not installed ({error})",
            change="pip install 'cp-shared-kv[mooncake]'",
        ) from error
    except ImportError as error:
        raise StartupError(
            "Mooncake's Transfer Engine cannot be loaded",
            value=error,
            change=_remedy(str(error)),
        ) from error
    # One for machines without CUDA would read a GPU's address as one of the host, and crash.
    if on_gpu and not getattr(wheel, "SUPPORT_CUDA", False):
        raise StartupError(
            "this build of Mooncake's Transfer Engine does not know memory of GPUs",
            change="pip uninstall mooncake-transfer-engine-non-cuda, then pip install "
            "mooncake-transfer-engine-cuda13 (mooncake-transfer-engine for CUDA 12)",
        )
    # One without NVLink takes TCP instead, and says so in its log alone.
    if over_nvlink and not getattr(wheel, "SUPPORT_INTRA_NVLINK", False):
        raise StartupError(
            f"this build of Mooncake's Transfer Engine has no NVLink, and {NVLINK} is set",
            change=f"unset {NVLINK} for TCP, or install mooncake-transfer-engine-cuda13",
        )
    return cast("_WheelEngine", cast("Any", wheel).TransferEngine())


def _remedy(message: str) -> str:
    library = message.split(":")[0]
    for name, package in _DEBIAN_PACKAGES.items():
        if library.startswith(name):
            return (
                f"install the system library {library}; on Debian or Ubuntu: apt install {package}"
            )
    if library.startswith("libcuda"):
        return (
            "another build of the same package is installed: pip uninstall it, then "
            "pip install --force-reinstall 'cp-shared-kv[mooncake]'"
        )
    return f"install the system library {library}"


def _in_a_forked_child() -> None:
    # The engine's threads are not here, and its destructor would wait for them.
    for engine in list(_engines):
        engine.outlive_the_process()
    _engines.clear()


def _at_exit() -> None:
    for engine in list(_engines):
        engine.shut_the_gate()


_engines: weakref.WeakSet[MooncakeEngine] = weakref.WeakSet()
os.register_at_fork(after_in_child=_in_a_forked_child)
atexit.register(_at_exit)

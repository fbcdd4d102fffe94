"""Real processes at the other end of a transport, for tests: told what to do, stopped, killed.

    with TransportPeers() as peers:
        peer = peers.start("mooncake", nbytes=4096)
        transport.connect(peer.info)

With `gpus` its memory is that of a GPU.

They come from a server process that has only imported, so that one starts in a tenth of a second;
a peer has nothing of the test's process. What they are told and answer is JSON.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import PrivateBuffer, SharedMemoryBuffer
from cp_shared_kv.memory.cuda_ipc import CudaIpcBuffer
from cp_shared_kv.testing.gpu_view import GpuView
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo, Runs
from cp_shared_kv.transfer.transports import TransferBackend, make_target, make_transport

REPLY_SECONDS = 30.0
RANGE_BYTES = 1 << 20
_names = count()

Environment = Mapping[str, str | None]
"""Variables to set, or to unset."""


def set_variables(environment: Environment) -> None:
    """Set and unset them in this process."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@dataclass(frozen=True)
class Gpus:
    """Which GPU is written to, and which one is read from; the same where there is one."""

    target: int
    sender: int


class PeerError(Exception):
    """A peer that failed at what it was told, or did not answer in time."""


class TransportPeer:
    """A process with a target of `nbytes` zeroed bytes; a sender too, once told to write."""

    def __init__(
        self, backend: TransferBackend, nbytes: int, environment: Environment, gpus: Gpus | None
    ) -> None:
        name = f"cpkv-test-{os.getpid()}-{next(_names)}"
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, backend, name, nbytes, environment, gpus)
        )
        self._process.start()
        theirs.close()
        session_id, regions, self.ipc_handle = self.answer()
        """What maps its memory, in hexadecimal, where it is a GPU's."""
        self.info = PeerInfo(session_id, msgspec.convert(regions, tuple[Region, ...]))
        """What its Hello would say."""
        self._mapped: SharedMemoryBuffer | GpuView
        if gpus is None:
            self._mapped = SharedMemoryBuffer.attach(name, nbytes)
        else:
            sender = torch.device("cuda", gpus.sender)
            self._mapped = GpuView(bytes.fromhex(self.ipc_handle), nbytes, sender)

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """Its memory, seen from here: u8[nbytes], a copy where it is a GPU's. Stays when the
        process has gone."""
        if isinstance(self._mapped, GpuView):
            return self._mapped.read()
        return self._mapped.tensor.numpy()

    def read(self, offset_bytes: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """u8[nbytes]: a part of its memory."""
        if isinstance(self._mapped, GpuView):
            return self._mapped.read(offset_bytes, nbytes)
        return self.memory[offset_bytes : offset_bytes + nbytes]

    @property
    def region(self) -> str:
        """The name of its memory."""
        return self.info.regions[0].name

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, what: str, **arguments: Any) -> Any:
        """Have it call its method `what`, and return what that returned."""
        self.tell(what, **arguments)
        return self.answer()

    def tell(self, what: str, **arguments: Any) -> None:
        """As `ask`, without waiting."""
        self._connection.send_bytes(msgspec.json.encode([what, arguments]))

    def tell_to_write(
        self, peer: TransportPeer, value: int, span: tuple[int, int], times: int = 1
    ) -> None:
        """Write bytes of `value` over the span of a peer's memory; `answer` says how it ended."""
        self.tell(
            "write",
            session_id=peer.info.session_id,
            regions=msgspec.to_builtins(peer.info.regions),
            value=value,
            span=span,
            times=times,
        )

    def stop(self) -> None:
        """SIGSTOP, and wait until no thread of it runs: on a busy machine one may go on a while."""
        os.kill(self.pid, signal.SIGSTOP)
        deadline = time.monotonic() + REPLY_SECONDS
        while not self._is_stopped():
            assert time.monotonic() < deadline, "SIGSTOP stops a process"
            time.sleep(0.001)

    def _is_stopped(self) -> bool:
        states = Path(f"/proc/{self.pid}/task").glob("*/stat")
        # After the name in brackets, which may hold anything.
        return all(state.read_text().rpartition(")")[2].split()[0] == "T" for state in states)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone for certain. Again: no effect."""
        self._process.kill()
        self._process.join(REPLY_SECONDS)
        if self._process.is_alive():
            raise PeerError(f"process {self.pid} outlives SIGKILL")

    def remove(self) -> None:
        """Kill it, and remove its shared memory's name, or unmap its GPU's memory."""
        self.kill()
        if isinstance(self._mapped, GpuView):
            self._mapped.close()
        else:
            self._mapped.unlink()

    def answer(self) -> Any:
        """What the last `tell` led to."""
        if not self._connection.poll(REPLY_SECONDS):
            raise PeerError(f"no answer within {REPLY_SECONDS} s")
        try:
            result, failure = msgspec.json.decode(self._connection.recv_bytes())
        except EOFError:
            raise PeerError("the process has ended") from None
        if failure is not None:
            raise PeerError(failure)
        return result


class TransportPeers:
    """The peers of a test: all are gone at its end."""

    def __init__(self) -> None:
        multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
        self._started: list[TransportPeer] = []

    def start(
        self,
        backend: TransferBackend,
        nbytes: int,
        environment: Environment | None = None,
        gpus: Gpus | None = None,
    ) -> TransportPeer:
        """A peer that has answered. PeerError if it could not start."""
        self._started.append(TransportPeer(backend, nbytes, environment or {}, gpus))
        return self._started[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for peer in self._started:
            peer.remove()


# The process ------------------------------------------------------------------------------------


class _Process:
    """What a peer can be told to do: its methods."""

    def __init__(self, backend: TransferBackend, name: str, nbytes: int, gpus: Gpus | None) -> None:
        self._backend: TransferBackend = backend
        self._name = name
        self._sender_device = None if gpus is None else torch.device("cuda", gpus.sender)
        device = None if gpus is None else torch.device("cuda", gpus.target)
        self._target = make_target(backend, name, device)
        self._buffer: SharedMemoryBuffer | CudaIpcBuffer = (
            SharedMemoryBuffer.create(name, nbytes)
            if device is None
            else CudaIpcBuffer(name, nbytes, device)
        )
        self._target.expose(self._buffer)

    def hello(self) -> tuple[str, tuple[Region, ...], str]:
        """With the handle by which the test maps what it wants to see."""
        buffer = self._buffer
        handle = buffer.ipc_handle.hex() if isinstance(buffer, CudaIpcBuffer) else ""
        return self._target.session_id, self._target.regions, handle

    def settled(self) -> bool:
        return self._target.settled()

    def close(self) -> None:
        self._target.close()

    def become_another_life(self) -> None:
        """As a process would be that has taken over the endpoint, and even the addresses."""
        life = self._target.regions[-1]
        ctypes.memset(life.address, 0, life.nbytes)

    def write(
        self, session_id: str, regions: list[Any], value: int, span: tuple[int, int], times: int
    ) -> str:
        """Write bytes of `value` over the span of a peer's memory, `times` over, in ranges."""
        peer = PeerInfo(session_id, msgspec.convert(regions, tuple[Region, ...]))
        start, stop = span
        source = PrivateBuffer(stop - start, self._sender_device)
        source.tensor.fill_(value)
        transport = make_transport(self._backend, f"{self._name}-sender", self._sender_device)
        transport.connect(peer)
        local = transport.register(source)
        offsets = np.arange(0, stop - start, RANGE_BYTES, dtype=np.int64)
        nbytes = np.minimum(RANGE_BYTES, stop - start - offsets)
        runs = Runs(local.name, peer.regions[0].name, offsets, start + offsets, nbytes)
        try:
            for _ in range(times):
                transport.write(session_id, runs).result(REPLY_SECONDS)
        except TransferError as error:
            return error.kind
        finally:
            transport.close()
        return "landed"


def _serve(
    connection: Connection,
    backend: TransferBackend,
    name: str,
    nbytes: int,
    environment: Environment,
    gpus: Gpus | None,
) -> None:
    set_variables(environment)
    torch.set_num_threads(1)
    process = _Process(backend, name, nbytes, gpus)
    connection.send_bytes(msgspec.json.encode([process.hello(), None]))
    while True:
        try:
            what, arguments = msgspec.json.decode(connection.recv_bytes())
        except EOFError:  # the test has ended
            os._exit(0)
        try:
            reply = [getattr(process, what)(**arguments), None]
        except Exception as error:  # whatever it is, the test reports it
            reply = [None, f"{type(error).__name__}: {error}"]
        connection.send_bytes(msgspec.json.encode(reply))

"""A sender over any transport and its peers in other processes, for tests of what all keep."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.errors import StartupError, TransferError
from cp_shared_kv.kernels import ALIGNMENT_BYTES
from cp_shared_kv.kernels.needs import missing_for_gpus
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.testing.faulty_transport import Faults, FaultyTransport
from cp_shared_kv.testing.transport_peer import (
    Environment,
    Gpus,
    TransportPeer,
    TransportPeers,
    set_variables,
)
from cp_shared_kv.transfer.mooncake import MooncakeEngine
from cp_shared_kv.transfer.mooncake_settings import NVLINK
from cp_shared_kv.transfer.shared_memory import SharedMemoryTransport
from cp_shared_kv.transfer.transport import KVTransport, Runs
from cp_shared_kv.transfer.transports import TransferBackend, make_transport

TransportKind = Literal[
    "shared_memory", "mooncake", "faulty", "cuda_ipc", "mooncake_gpu_tcp", "mooncake_nvlink"
]
GPU_KINDS: tuple[TransportKind, ...] = ("cuda_ipc", "mooncake_gpu_tcp", "mooncake_nvlink")
"""Those that move memory of GPUs."""
HASTE: dict[TransportKind, int] = {"cuda_ipc": 300, "mooncake_nvlink": 30}
"""How many writes take as long as one of the others: a test that looks at one under way makes more
of them."""
LIMIT_SECONDS = 30.0
SETTLE_SECONDS = 0.05
"""Nothing that a test waits for takes longer."""
STALL_SECONDS = 4.0
MILD = Faults(duplicate=0.3, parts=4, delay_seconds=0.01)
"""Faults that no caller may notice."""
Offsets = int | list[int] | npt.NDArray[np.int64]


class TransportEnds:
    """A sender with `nbytes` of random bytes to send; peers of as many zeroed bytes each.

    As long as it lives, the environment has to be the one that `in_environment_of` makes.
    """

    def __init__(self, kind: TransportKind, nbytes: int, seed: int = 0) -> None:
        self.kind: TransportKind = kind
        self.backend: TransferBackend = "mooncake" if "mooncake" in kind else "shared_memory"
        self.nbytes = nbytes
        self.unit = ALIGNMENT_BYTES if kind == "cuda_ipc" else 1
        """What offsets and lengths have to be multiples of."""
        self._gpus = two_gpus() if kind in GPU_KINDS else None
        self._device = None if self._gpus is None else torch.device("cuda", self._gpus.sender)
        self.peers = TransportPeers()
        self.transport = self._make(seed)
        self._buffer = self.memory(nbytes)
        random = np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)
        self._buffer.tensor.copy_(torch.from_numpy(random))
        self.source: npt.NDArray[np.uint8] = random
        """What is sent: in place, or a copy where it is a GPU's."""
        if self._device is None:
            self.source = self._buffer.tensor.numpy()
        self.region = self.transport.register(self._buffer)

    def _make(self, seed: int) -> KVTransport:
        if self.kind == "faulty":
            return FaultyTransport(SharedMemoryTransport("sender"), seed, MILD)
        if self.backend == "shared_memory":
            return make_transport(self.backend, "sender", self._device)
        from cp_shared_kv.transfer.mooncake_transport import MooncakeTransport

        return MooncakeTransport(
            "sender",
            self._device,
            stall_seconds=STALL_SECONDS,
            contact_seconds=3.0,
            drain_seconds=LIMIT_SECONDS,
        )

    def memory(self, nbytes: int) -> PrivateBuffer:
        """Zeroed bytes that this end can send from."""
        return PrivateBuffer(nbytes, self._device)

    def wipe(self) -> None:
        """Zero what there is to send."""
        self._buffer.tensor.zero_()
        if self._device is not None:
            torch.cuda.synchronize(self._device)

    def start_peer(self) -> TransportPeer:
        """A process that is not connected yet."""
        return self.peers.start(
            self.backend, self.nbytes, environment_of(self.kind), gpus=self._gpus
        )

    def peer(self) -> TransportPeer:
        """A process that can be written to."""
        peer = self.start_peer()
        self.transport.connect(peer.info)
        return peer

    def runs(self, peer: TransportPeer, local: Offsets, remote: Offsets, nbytes: Offsets) -> Runs:
        """Ranges out of the source into the peer's memory; one where the offsets are numbers."""
        columns = [np.atleast_1d(np.asarray(x, dtype=np.int64)) for x in (local, remote, nbytes)]
        return Runs(self.region.name, peer.region, *columns)

    def all_of_it(self, peer: TransportPeer, range_bytes: int) -> Runs:
        """The whole source over the whole of the peer's memory, in ranges."""
        offsets = np.arange(0, self.nbytes, range_bytes, dtype=np.int64)
        return self.runs(peer, offsets, offsets, np.minimum(range_bytes, self.nbytes - offsets))

    def write(self, peer: TransportPeer, runs: Runs) -> int:
        """The bytes that landed."""
        landed = self.transport.write(peer.info.session_id, runs).result(LIMIT_SECONDS)
        if self.kind == "mooncake_gpu_tcp":
            # Its last copy to the peer's GPU is queued there, in order with the peer's own work
            # and not with what this process looks at, see ADR 0012.
            time.sleep(SETTLE_SECONDS)
        return landed

    def failure(self, peer: TransportPeer, runs: Runs) -> TransferError:
        """How a write failed that has to fail."""
        error = outcome(self.transport.write(peer.info.session_id, runs))
        assert isinstance(error, TransferError), f"{error} bytes landed"
        return error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.peers.__exit__(kind, error, traceback)
        self.transport.close()


def two_gpus() -> Gpus:
    """Two GPUs, or one for both ends where there is no other."""
    return Gpus(target=0, sender=min(1, torch.cuda.device_count() - 1))


def environment_of(kind: TransportKind) -> Environment:
    """Mooncake's settings for a kind: NVLink if it is that, and none of what there is already."""
    if kind not in GPU_KINDS:
        return {}
    nothing: dict[str, str | None] = {name: None for name in os.environ if name.startswith("MC_")}
    return {**nothing, NVLINK: "1" if kind == "mooncake_nvlink" else None}


@contextmanager
def in_environment_of(kind: TransportKind) -> Generator[None]:
    """This process in the environment of a kind, and back as it was."""
    before = dict(os.environ)
    set_variables(environment_of(kind))
    try:
        yield
    finally:
        set_variables({**dict.fromkeys(os.environ), **before})


@cache
def why_not(kind: TransportKind) -> str | None:
    """Why this machine has no transport of a kind; None if it has. Ask in its environment."""
    on_gpu = kind in GPU_KINDS
    if on_gpu and (missing := missing_for_gpus(1)):
        return missing
    if "mooncake" in kind:
        try:
            MooncakeEngine("127.0.0.1", on_gpu=on_gpu)
        except StartupError as error:
            return str(error)
    return None


def outcome(future: Future[int]) -> int | TransferError:
    """The bytes that landed, or why they did not."""
    error = future.exception(LIMIT_SECONDS)
    if error is None:
        return future.result()
    assert isinstance(error, TransferError), error
    return error


def revived(transport: KVTransport, peer: TransportPeer) -> None:
    """Waits until the transport has found the peer again."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not transport.revive(peer.info.session_id):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stopped_in_mid_write(transport: KVTransport, peer: TransportPeer, runs: Runs) -> TransferError:
    """Stops the peer during a write; returns how that failed."""
    for _ in range(20):
        peer.memory[:] = 0
        future = transport.write(peer.info.session_id, runs)
        while not peer.memory[::4096].any():
            time.sleep(0.0005)
        peer.stop()
        had_ended = future.done()
        found = outcome(future)
        if isinstance(found, TransferError) and not had_ended:
            return found
        peer.resume()  # it was too late: all had landed, or a busy machine had stalled it before
        revived(transport, peer)
    raise AssertionError(f"{runs.total_bytes} bytes always land before the peer stops")

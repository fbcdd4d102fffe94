"""A sender over any transport and its peers in other processes, for tests of what all keep."""

from __future__ import annotations

import time
from concurrent.futures import Future
from types import TracebackType
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.testing.faulty_transport import Faults, FaultyTransport
from cp_shared_kv.testing.transport_peer import TransportPeer, TransportPeers
from cp_shared_kv.transfer.shared_memory import SharedMemoryTransport
from cp_shared_kv.transfer.transport import KVTransport, Runs
from cp_shared_kv.transfer.transports import TransferBackend

TransportKind = Literal["shared_memory", "mooncake", "faulty"]
LIMIT_SECONDS = 30.0
"""Nothing that a test waits for takes longer."""
STALL_SECONDS = 4.0
MILD = Faults(duplicate=0.3, parts=4, delay_seconds=0.01)
"""Faults that no caller may notice."""
Offsets = int | list[int] | npt.NDArray[np.int64]


class TransportEnds:
    """A sender with `nbytes` of random bytes to send; peers of as many zeroed bytes each."""

    def __init__(self, kind: TransportKind, nbytes: int, seed: int = 0) -> None:
        self.kind: TransportKind = kind
        self.backend: TransferBackend = "mooncake" if kind == "mooncake" else "shared_memory"
        self.nbytes = nbytes
        self.peers = TransportPeers()
        self.transport = self._make(seed)
        buffer = PrivateBuffer(nbytes)
        self.source: npt.NDArray[np.uint8] = buffer.tensor.numpy()
        self.source[:] = np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)
        self.region = self.transport.register(buffer)

    def _make(self, seed: int) -> KVTransport:
        match self.kind:
            case "shared_memory":
                return SharedMemoryTransport("sender")
            case "faulty":
                return FaultyTransport(SharedMemoryTransport("sender"), seed, MILD)
            case "mooncake":
                from cp_shared_kv.transfer.mooncake_transport import MooncakeTransport

                return MooncakeTransport(
                    "sender",
                    stall_seconds=STALL_SECONDS,
                    contact_seconds=3.0,
                    drain_seconds=LIMIT_SECONDS,
                )

    def start_peer(self) -> TransportPeer:
        """A process that is not connected yet."""
        return self.peers.start(self.backend, self.nbytes)

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
        return self.transport.write(peer.info.session_id, runs).result(LIMIT_SECONDS)

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

"""One host: the peer's pool is mapped into this process, and a write is a copy."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from cp_shared_kv.errors import CpkvError, TransferError
from cp_shared_kv.memory.buffers import Buffer, SharedMemoryBuffer
from cp_shared_kv.transfer.local_regions import LocalRegions, Memory
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.strided_copy import copy_runs
from cp_shared_kv.transfer.transport import PeerInfo, Runs, check_ranges


@dataclass
class _Peer:
    """A peer, and its regions in this process: None while it is unreachable."""

    info: PeerInfo
    memory: dict[str, Memory] | None = None


class SharedMemoryTransport:
    """KVTransport between processes of one host and user.

    The peer's regions are POSIX shared-memory segments, mapped by name on `connect`; their owner
    may unlink the names after that. A write runs in the caller's thread with the GIL released,
    so its future is done when it returns, and it either lands in full or touches nothing: every
    TransferError of `write` is quiescent.
    """

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._changed = threading.Condition()
        self._local = LocalRegions(session_id)
        self._peers: dict[str, _Peer] = {}
        self._writes_to: Counter[str] = Counter()
        self._closed = False

    @property
    def session_id(self) -> str:
        """What peers know this end as."""
        return self._session_id

    def register(self, buffer: Buffer) -> Region:
        """Let writes read from `buffer`, private or shared. `conflict` if its name is taken."""
        with self._changed:
            self._check_open()
            return self._local.add(buffer)

    def unregister(self, region: Region) -> None:
        """Forget a region. `in_use` while a write reads from it, `unknown_region` if it is none."""
        with self._changed:
            self._local.remove(region)

    def connect(self, peer: PeerInfo) -> None:
        """Map a peer's regions. `unreachable` if one is not there: `revive` may try again.

        `conflict` if the session is known with other regions.
        """
        with self._changed:
            self._check_open()
            known = self._peers.setdefault(peer.session_id, _Peer(peer))
            if known.info != peer:
                raise self._error(
                    "peer is connected with other regions", "conflict", peer=peer.session_id
                )
            self._map(known)

    def disconnect(self, peer: str) -> None:
        """Forget a peer, once the writes to it that are under way have ended."""
        with self._changed:
            self._peers.pop(peer, None)
            self._changed.wait_for(lambda: not self._writes_to[peer])

    def write(self, peer: str, runs: Runs) -> Future[int]:
        """Copy `runs` now. Returns a future that is done: bytes landed, or TransferError."""
        future: Future[int] = Future()
        try:
            with self._in_use(peer, runs) as (local, remote):
                check_ranges("local", peer, runs.local_offset_bytes, runs.nbytes, local.nbytes)
                check_ranges("remote", peer, runs.remote_offset_bytes, runs.nbytes, remote.nbytes)
                copy_runs(
                    local, remote, runs.local_offset_bytes, runs.remote_offset_bytes, runs.nbytes
                )
            future.set_result(runs.total_bytes)
        except TransferError as error:
            future.set_exception(error)
        return future

    def revive(self, peer: str) -> bool:
        """Map the regions of a peer that could not be reached when it was connected."""
        with self._changed:
            known = self._peers.get(peer)
            if known is None:
                return False
            try:
                self._map(known)
            except TransferError:
                return False
            return True

    def close(self) -> None:
        """Refuse new writes, wait for those under way, unmap everything."""
        with self._changed:
            self._closed = True
            self._peers.clear()
            self._changed.wait_for(lambda: not self._local.writes)
            self._local.clear()

    @contextmanager
    def _in_use(self, peer: str, runs: Runs) -> Generator[tuple[Memory, Memory]]:
        """The memory of both regions, kept from unregister, disconnect and close meanwhile."""
        with self._changed:
            self._check_open(peer)
            known = self._peers.get(peer)
            if known is None:
                raise self._error(
                    "write to a peer that is not connected", "unknown_peer", peer=peer
                )
            if known.memory is None:
                raise self._error("write to a peer that is unreachable", "unreachable", peer=peer)
            local = self._local.get(runs.local_region)
            remote = known.memory.get(runs.remote_region)
            if local is None or remote is None:
                missing = runs.local_region if local is None else runs.remote_region
                raise self._error(
                    f"{'local' if local is None else 'remote'} region {missing} does not exist",
                    "unknown_region",
                    peer=peer,
                )
            self._local.begin_write(runs.local_region)
            self._writes_to[peer] += 1
        try:
            yield local, remote
        finally:
            with self._changed:
                self._local.end_write(runs.local_region)
                self._writes_to[peer] -= 1
                self._changed.notify_all()

    def _map(self, peer: _Peer) -> None:
        if peer.memory is not None:
            return
        mapped: dict[str, Memory] = {}
        for region in peer.info.regions:
            try:
                mapped[region.name] = SharedMemoryBuffer.attach(
                    region.name, region.nbytes
                ).tensor.numpy()
            except CpkvError as error:
                raise self._error(
                    f"cannot map the peer's memory: {error}",
                    "unreachable",
                    peer=peer.info.session_id,
                ) from error
        peer.memory = mapped

    def _check_open(self, peer: str | None = None) -> None:
        if self._closed:
            raise self._error("transport is closed", "closed", peer=peer)

    def _error(self, what: str, kind: str, *, peer: str | None = None) -> TransferError:
        return TransferError(what, kind=kind, peer=peer or self._session_id, quiescent=True)


class SharedMemoryTarget:
    """KVTarget of one host: peers map the segments by name.

    A write is a copy by the sender's own hand, so a sender that has ended writes no more.
    """

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._regions: list[Region] = []

    @property
    def session_id(self) -> str:
        """What senders connect to."""
        return self._session_id

    @property
    def regions(self) -> tuple[Region, ...]:
        """The exposed segments, in the order in which they were exposed."""
        return tuple(self._regions)

    def expose(self, buffer: Buffer) -> Region:
        """Name a segment to peers. `conflict` for private memory, and for one named before."""
        known = {region.name for region in self._regions}
        if buffer.name is None or buffer.name in known:
            raise TransferError(
                "memory that peers are to map needs a name, each its own",
                kind="conflict",
                peer=self._session_id,
                quiescent=True,
                value=buffer.name,
            )
        self._regions.append(Region(buffer.name, buffer.nbytes))
        return self._regions[-1]

    def connections(self) -> frozenset[str]:
        """None: senders write by themselves."""
        return frozenset()

    def settled(self, before: Collection[str] = ()) -> bool:  # noqa: ARG002
        """Always: nothing is ever under way without its sender."""
        return True

    def close(self) -> None:
        """Name no segment any more. Peers keep what they have mapped."""
        self._regions.clear()

"""The books of a transport that maps its peers' memory: who is connected, what is under way."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from cp_shared_kv.errors import CpkvError, TransferError
from cp_shared_kv.memory.buffers import Buffer
from cp_shared_kv.transfer.local_regions import LocalRegions
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo, Runs, check_ranges

Local = TypeVar("Local")
Remote = TypeVar("Remote")
Ended = Callable[[TransferError | None], None]


@dataclass
class _Peer(Generic[Remote]):
    """A peer, and its regions in this process: None while it is unreachable."""

    info: PeerInfo
    memory: dict[str, Remote] | None = None


class MappedTransport(ABC, Generic[Local, Remote]):
    """A KVTransport between processes of one host, all but the copying.

    `Local` is how a registered buffer is held, `Remote` a peer's region that has been mapped.

    One lock guards the books. `connect` and `revive` hold it while they map: that asks the kernel
    or the driver, not the peer, so a write that comes meanwhile is not held up by a stopped peer.
    `disconnect` and `close` release it while they wait for writes.
    """

    END_SECONDS: float | None = None
    """How long `disconnect` and `close` wait for writes under way; None: as long as they take."""

    def __init__(self, session_id: str, view: Callable[[torch.Tensor], Local]) -> None:
        self._session_id = session_id
        self._changed = threading.Condition()
        self._local = LocalRegions(session_id, view)
        self._peers: dict[str, _Peer[Remote]] = {}
        self._leaving: dict[str, _Peer[Remote]] = {}
        self._writes_to: Counter[str] = Counter()
        self._closed = False

    @abstractmethod
    def _attach(self, region: Region) -> Remote:
        """Map a peer's region. CpkvError if it cannot be."""

    @abstractmethod
    def _detach(self, memory: Remote) -> None:
        """Unmap a region to which no write is under way."""

    @abstractmethod
    def _copy(self, local: Local, remote: Remote, runs: Runs, ended: Ended) -> None:
        """Copy checked ranges, and call `ended` once they have landed, from any thread.

        A TransferError raised here instead says that nothing was begun.
        """

    @property
    def session_id(self) -> str:
        """What peers know this end as."""
        return self._session_id

    def register(self, buffer: Buffer) -> Region:
        """Let writes read from `buffer`. `conflict` if its name is taken."""
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
            known = self._peers.pop(peer, None)
            if known is not None:
                self._leaving[peer] = known
            self._await(lambda: not self._writes_to[peer], peer)
            self._unmap(self._leaving.pop(peer, None))

    def write(self, peer: str, runs: Runs) -> Future[int]:
        """Copy `runs`. The future has the bytes that landed, or a TransferError."""
        future: Future[int] = Future()

        def ended(error: TransferError | None) -> None:
            self._end(peer, runs)
            if error is None:
                future.set_result(runs.total_bytes)
            else:
                future.set_exception(error)

        try:
            local, remote = self._begin(peer, runs)
        except TransferError as error:
            future.set_exception(error)
            return future
        try:
            self._copy(local, remote, runs, ended)
        except TransferError as error:
            ended(error)
        except BaseException:
            self._end(peer, runs)  # or whoever leaves would wait for this write
            raise
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
            self._leaving |= self._peers
            self._peers.clear()
            self._await(lambda: not self._local.writes, None)
            for peer in list(self._leaving):
                self._unmap(self._leaving.pop(peer))
            self._local.clear()

    def _await(self, condition: Callable[[], bool], peer: str | None) -> None:
        if not self._changed.wait_for(condition, self.END_SECONDS):
            raise TransferError(
                f"a write has not ended in {self.END_SECONDS} seconds",
                kind="in_use",
                peer=peer or self._session_id,
                quiescent=False,
            )

    def _begin(self, peer: str, runs: Runs) -> tuple[Local, Remote]:
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
            region_bytes = {region.name: region.nbytes for region in known.info.regions}
            local_bytes = self._local.nbytes(runs.local_region)
            check_ranges("local", peer, runs.local_offset_bytes, runs.nbytes, local_bytes)
            remote_bytes = region_bytes[runs.remote_region]
            check_ranges("remote", peer, runs.remote_offset_bytes, runs.nbytes, remote_bytes)
            self._local.begin_write(runs.local_region)
            self._writes_to[peer] += 1
        return local, remote

    def _end(self, peer: str, runs: Runs) -> None:
        with self._changed:
            self._local.end_write(runs.local_region)
            self._writes_to[peer] -= 1
            self._changed.notify_all()

    def _map(self, peer: _Peer[Remote]) -> None:
        if peer.memory is not None:
            return
        mapped: dict[str, Remote] = {}
        for region in peer.info.regions:
            try:
                mapped[region.name] = self._attach(region)
            except CpkvError as error:
                for memory in mapped.values():
                    self._detach(memory)
                raise self._error(
                    f"cannot map the peer's memory: {error}",
                    "unreachable",
                    peer=peer.info.session_id,
                ) from error
        peer.memory = mapped

    def _unmap(self, peer: _Peer[Remote] | None) -> None:
        if peer is not None and peer.memory is not None:
            for memory in peer.memory.values():
                self._detach(memory)

    def _check_open(self, peer: str | None = None) -> None:
        if self._closed:
            raise self._error("transport is closed", "closed", peer=peer)

    def _error(self, what: str, kind: str, *, peer: str | None = None) -> TransferError:
        return TransferError(what, kind=kind, peer=peer or self._session_id, quiescent=True)

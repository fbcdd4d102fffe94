"""Writes over Mooncake: TCP, or NVLink between GPUs, and nothing given up half-way."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from functools import partial

import torch

from cp_shared_kv.errors import ConfigError, TransferError
from cp_shared_kv.memory.buffers import Buffer
from cp_shared_kv.transfer.local_regions import LocalRegions
from cp_shared_kv.transfer.mooncake import MooncakeEngine
from cp_shared_kv.transfer.mooncake_lane import MooncakeLane
from cp_shared_kv.transfer.mooncake_session import LOOPBACK, MooncakePeer
from cp_shared_kv.transfer.mooncake_settings import NVLINK
from cp_shared_kv.transfer.mooncake_write import MooncakeWrite
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo, Runs, check_ranges

_REVIVE_SECONDS = 0.25


class MooncakeTransport:
    """KVTransport to MooncakeTargets: of this host, and with `other_hosts` of others as well.

    A write's future is done when all of it has landed, or when it has failed and none of it can
    land any more; part of a failed write may have. The one exception is `stalled`: nothing has
    landed for `stall_seconds`, the peer counts as unreachable, and what was sent may land yet.
    Further kinds of failure: `refused` (the peer lives, and did not take a range) and `forked`.

    From another host nobody can see what a peer has read but not applied when a connection is lost.
    So a write to one that fails once begun is not quiescent, and never will be: `revive` stays
    False, and its pages are free when the peer's process is dead. Only then `disconnect` it.

    Each peer has a lane of its own, so no call for one waits for another: all that is shared is a
    lock on the books. A new engine is made under it, which holds up every Python thread anyway.

    With a `device`, writes are read from that GPU's memory, whatever has allocated it, once it has
    done what is queued on the current stream when `write` is called.

    Local memory is not served to anybody. `contact_seconds` bounds `connect`,
    `drain_seconds` bounds `disconnect` and `close`. StartupError without the wheel, whose
    settings are those of the whole process.
    """

    def __init__(
        self,
        session_id: str,
        device: torch.device | None = None,
        *,
        other_hosts: bool = False,
        stall_seconds: float = 30.0,
        contact_seconds: float = 5.0,
        drain_seconds: float = 10.0,
    ) -> None:
        self._session_id = session_id
        self._device = device
        self._other_hosts = other_hosts
        self._stall_seconds = stall_seconds
        self._contact_seconds = contact_seconds
        self._drain_seconds = drain_seconds
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._local = LocalRegions(session_id, lambda tensor: tensor)
        self._lanes: dict[str, MooncakeLane] = {}
        # An engine takes up to a second to destroy, during which no Python thread runs. So those
        # of peers that have gone serve the next ones.
        self._idle_engines = [self._make_engine()]
        if other_hosts and self._idle_engines[0].over_nvlink:
            raise ConfigError(
                f"the environment sets {NVLINK}, which does not leave its host",
                change=f"unset {NVLINK}, or drop --control-host",
            )
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="mooncake stalls", daemon=True).start()

    @property
    def session_id(self) -> str:
        """What peers know this end as."""
        return self._session_id

    def register(self, buffer: Buffer) -> Region:
        """Let writes read from `buffer`. `conflict` if its name is taken, or if it is memory that
        this transport was not made for."""
        self._check_open()
        if buffer.tensor.is_cuda != (self._device is not None):
            where = "the host's memory" if self._device is None else f"memory of {self._device}"
            raise self._error(f"region of {buffer.tensor.device}, not of {where}", "conflict")
        with self._lock:
            return self._local.add(buffer)

    def unregister(self, region: Region) -> None:
        """Forget a region. `in_use` while a write may read from it, one that stalled included."""
        self._check_process()
        with self._lock:
            self._local.remove(region)

    def connect(self, peer: PeerInfo) -> None:
        """Find a receiver. `unreachable` if it is not there in time: `revive` may try again.

        `unreachable` too, and nothing kept, for what is no MooncakeTarget, or not of this host;
        `conflict` if the session is known with other regions.
        """
        self._check_open()
        checked = MooncakePeer.of(peer, other_hosts=self._other_hosts)
        with self._lock:
            lane = self._lanes.get(peer.session_id)
            if lane is not None:
                self._check_connected(lane, peer)
                return
            engine = self._idle_engines.pop() if self._idle_engines else self._make_engine()
            lane = MooncakeLane(checked, engine, self._stall_seconds, self._retire, self._device)
            self._lanes[peer.session_id] = lane
        lane.find(self._contact_seconds)

    def disconnect(self, peer: str) -> None:
        """Forget a peer: submit nothing more, wait for what is under way, `in_use` if it stays."""
        self._check_process()
        with self._lock:
            lane = self._lanes.get(peer)
        if lane is not None:
            self._disconnect([lane])

    def write(self, peer: str, runs: Runs) -> Future[int]:
        """Send `runs` after those before it to that peer, from a thread of this transport."""
        try:
            self._check_open(peer)
            with self._lock:
                lane = self._lanes.get(peer)
                if lane is None:
                    raise self._error(
                        "write to a peer that is not connected", "unknown_peer", peer=peer
                    )
                write = self._begin(lane.peer, runs)
            try:
                lane.put(write)
            except TransferError:
                write.release()
                raise
        except TransferError as error:
            failed: Future[int] = Future()
            failed.set_exception(error)
            return failed
        return write.future

    def revive(self, peer: str) -> bool:
        """Look for a peer again, a moment a call: True may come from a later one.

        False while a write to it that stalled has not ended, or if nobody can tell whether it has.
        """
        self._check_process()
        with self._lock:
            lane = self._lanes.get(peer)
        if lane is None:
            return False
        try:
            lane.find(_REVIVE_SECONDS)
        except TransferError:
            return False
        return True

    def close(self) -> None:
        """Disconnect all peers. Takes up to a second for each engine, in which no thread runs."""
        self._check_process()
        self._closed.set()
        with self._lock:
            lanes = list(self._lanes.values())
        self._disconnect(lanes)
        with self._lock:
            self._local.clear()
            engines, self._idle_engines = self._idle_engines, []
        del engines

    def _check_connected(self, lane: MooncakeLane, peer: PeerInfo) -> None:
        """Connecting a known peer again is no matter, unless it is another or is on its way out."""
        if lane.peer.info != peer:
            raise self._error(
                "peer is connected with other regions", "conflict", peer=peer.session_id
            )
        if lane.closing:
            raise self._error(
                "peer is being disconnected and a write to it has not ended",
                "in_use",
                peer=peer.session_id,
                quiescent=False,
            )

    def _begin(self, peer: MooncakePeer, runs: Runs) -> MooncakeWrite:
        """A write whose every range lies in what is registered here and announced there."""
        session_id = peer.info.session_id
        memory, remote = self._local.get(runs.local_region), peer.regions.get(runs.remote_region)
        if memory is None or remote is None:
            side, name = ("local", runs.local_region)
            if memory is not None:
                side, name = ("remote", runs.remote_region)
            raise self._error(
                f"{side} region {name} does not exist", "unknown_region", peer=session_id
            )
        check_ranges("local", session_id, runs.local_offset_bytes, runs.nbytes, memory.nbytes)
        check_ranges("remote", session_id, runs.remote_offset_bytes, runs.nbytes, remote.nbytes)
        self._local.begin_write(runs.local_region)
        return MooncakeWrite(
            memory,
            runs.local_offset_bytes,
            runs.remote_offset_bytes + remote.address,
            runs.nbytes,
            partial(self._end, runs.local_region),
        )

    def _end(self, local_region: str) -> None:
        with self._lock:
            self._local.end_write(local_region)

    def _disconnect(self, lanes: list[MooncakeLane]) -> None:
        for lane in lanes:
            lane.begin_close()
        deadline = time.monotonic() + self._drain_seconds
        for lane in lanes:
            session_id = lane.peer.info.session_id
            # What may land at a dead process of another host harms nobody, and the end of its
            # connection may be a quarter of an hour away.
            if not lane.peer.elsewhere and not lane.closed(max(0.0, deadline - time.monotonic())):
                raise self._error(
                    f"a write to the peer has not ended in {self._drain_seconds} s",
                    "in_use",
                    peer=session_id,
                    quiescent=False,
                )
            with self._lock:
                self._lanes.pop(session_id, None)

    def _make_engine(self) -> MooncakeEngine:
        return MooncakeEngine(LOOPBACK, on_gpu=self._device is not None)

    def _retire(self, engine: MooncakeEngine) -> None:
        # Over NVLink an engine has the peer's memory mapped until it is destroyed: a GPU's, which
        # the peer's next life needs.
        if engine.over_nvlink:
            return
        with self._lock:
            if not self._closed.is_set():
                self._idle_engines.append(engine)

    def _watch(self) -> None:
        while not self._closed.wait(self._stall_seconds / 8):
            with self._lock:
                lanes = list(self._lanes.values())
            for lane in lanes:
                lane.check_stall()

    def _check_open(self, peer: str | None = None) -> None:
        self._check_process()
        if self._closed.is_set():
            raise self._error("transport is closed", "closed", peer=peer)

    def _check_process(self) -> None:
        # Before any lock: at the fork another thread may have held it.
        if os.getpid() != self._process:
            raise TransferError(
                "transport belongs to another process; start this one afresh (spawn, not fork)",
                kind="forked",
                peer=self._session_id,
                quiescent=True,
                value=self._process,
            )

    def _error(
        self, what: str, kind: str, *, peer: str | None = None, quiescent: bool = True
    ) -> TransferError:
        return TransferError(what, kind=kind, peer=peer or self._session_id, quiescent=quiescent)

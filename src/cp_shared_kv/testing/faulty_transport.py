"""A transport that does to its writes what networks and dying processes do, by a seed.

    transport = FaultyTransport(SharedMemoryTransport("rank0"), seed=7, faults=Faults(late=0.1))

It keeps the promises of KVTransport over any transport that it wraps: a failure that it calls
quiescent is one, and what it counts as landed has. The same writes in the same order meet the
same faults under the same seed.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import Buffer
from cp_shared_kv.testing.cut_runs import cut_at_byte, cut_in_parts
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import KVTransport, PeerInfo, Runs, first_outside

DRAIN_SECONDS = 20.0


@dataclass(frozen=True)
class Faults:
    """What happens to a write. `drop`, `partial` and `late` are probabilities, met one at most."""

    drop: float = 0.0
    """Nothing lands, and the write fails."""
    partial: float = 0.0
    """Some parts land, and the write fails."""
    late: float = 0.0
    """The write fails at once, not quiescent, and lands `late_seconds` later."""
    late_seconds: float = 0.1
    duplicate: float = 0.0
    """Probability that a part is written twice, both times before its write has ended."""
    parts: int = 1
    """A write goes in up to so many parts."""
    delay_seconds: float = 0.0
    """Each part waits up to so long: parts and writes overtake each other."""
    die_at_byte: int | None = None
    """This end is gone when it has written so many bytes, be it in the middle of a range."""


@dataclass(eq=False)
class _Write:
    peer: str
    local_region: str
    total_bytes: int
    parts_left: int
    error: TransferError | None = None
    """What it ends with, or has failed with already."""
    answered: bool = False
    """The future was told already, at the beginning."""
    future: Future[int] = field(default_factory=lambda: Future[int]())


class FaultyTransport:
    """KVTransport around `inner`, which it owns. `died` is called when `die_at_byte` is reached.

    Kinds of failure beside those of `inner`: `dropped`, `partial`, `late`; `closed` after death.
    """

    def __init__(
        self,
        inner: KVTransport,
        seed: int,
        faults: Faults,
        died: Callable[[], None] = lambda: None,
    ) -> None:
        self._inner = inner
        self._seed = seed
        self._faults = faults
        self._died = died
        self._changed = threading.Condition()
        self._local: dict[str, Region] = {}
        self._remote: dict[str, PeerInfo] = {}
        self._due: list[tuple[float, int, _Write, Runs]] = []
        self._part_numbers, self._write_numbers = count(), count()
        self._under_way_from: Counter[str] = Counter()
        self._under_way_to: Counter[str] = Counter()
        self._lost: set[str] = set()
        self._bytes_written = 0
        self._dead = False
        self._closed = False
        threading.Thread(target=self._run, name="faulty transport", daemon=True).start()

    @property
    def session_id(self) -> str:
        """That of the inner transport."""
        return self._inner.session_id

    def register(self, buffer: Buffer) -> Region:
        """As the inner transport."""
        region = self._inner.register(buffer)
        with self._changed:
            self._local[region.name] = region
        return region

    def unregister(self, region: Region) -> None:
        """As the inner transport; `in_use` while a part of a write has not landed."""
        with self._changed:
            if self._under_way_from[region.name]:
                raise self._error("region is being read by a write", "in_use", quiescent=False)
            self._inner.unregister(region)
            self._local.pop(region.name, None)

    def connect(self, peer: PeerInfo) -> None:
        """As the inner transport."""
        self._inner.connect(peer)
        with self._changed:
            self._remote[peer.session_id] = peer

    def disconnect(self, peer: str) -> None:
        """As the inner transport, once every part to that peer has landed."""
        with self._changed:
            self._remote.pop(peer, None)
            self._wait_for(lambda: not self._under_way_to[peer])
            self._lost.discard(peer)
        self._inner.disconnect(peer)

    def write(self, peer: str, runs: Runs) -> Future[int]:
        """As the inner transport, with faults. What that would refuse goes straight to it."""
        with self._changed:
            if self._dead:
                return self._refused("this end has died", "closed", peer)
            if self._closed or not self._is_valid(peer, runs):
                return self._inner.write(peer, runs)
            if peer in self._lost:
                return self._refused("write to a peer that is unreachable", "unreachable", peer)
            write = self._begin(peer, runs)
        if write.answered:
            write.future.set_exception(write.error)
        return write.future

    def revive(self, peer: str) -> bool:
        """As the inner transport; False while a part of a write to the peer has not landed."""
        with self._changed:
            if self._dead or self._under_way_to[peer]:
                return False
            self._lost.discard(peer)
        return self._inner.revive(peer)

    def close(self) -> None:
        """As the inner transport, once every part has landed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._wait_for(lambda: not self._under_way_to.total())
        self._inner.close()

    # What the seed decides -------------------------------------------------------------------

    def _begin(self, peer: str, runs: Runs) -> _Write:
        faults = self._faults
        chance = np.random.default_rng([self._seed, next(self._write_numbers)])
        parts = cut_in_parts(runs, int(chance.integers(1, faults.parts + 1)), chance)
        parts += [part for part in parts if chance.random() < faults.duplicate]
        fate, late, error = chance.random(), False, None
        if fate < faults.drop:
            parts.clear()
            error = self._error("write was dropped", "dropped", peer=peer)
        elif fate < faults.drop + faults.partial:
            del parts[chance.integers(len(parts)) :]
            error = self._error("write landed in part", "partial", peer=peer)
        elif fate < faults.drop + faults.partial + faults.late:
            late = True
            error = self._error("write was lost sight of", "late", peer=peer, quiescent=False)
            self._lost.add(peer)
        write = _Write(peer, runs.local_region, runs.total_bytes, len(parts), error)
        write.answered = late or not parts
        write.future.set_running_or_notify_cancel()
        earliest = time.monotonic() + late * faults.late_seconds
        for part in parts:
            due = earliest + chance.uniform(0, faults.delay_seconds)
            heapq.heappush(self._due, (due, next(self._part_numbers), write, part))
        if parts:
            self._under_way_from[write.local_region] += 1
            self._under_way_to[peer] += 1
            self._changed.notify_all()
        return write

    def _is_valid(self, peer: str, runs: Runs) -> bool:
        """The inner transport would take the write, which cut up it could refuse in part only."""
        local, remote = self._local.get(runs.local_region), self._remote.get(peer)
        regions = {region.name: region for region in remote.regions} if remote else {}
        target = regions.get(runs.remote_region)
        return (
            local is not None
            and target is not None
            and runs.count > 0
            and first_outside(runs.local_offset_bytes, runs.nbytes, local.nbytes) is None
            and first_outside(runs.remote_offset_bytes, runs.nbytes, target.nbytes) is None
        )

    # The thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while (due := self._next()) is not None:
            write, part = due
            limit_bytes = self._faults.die_at_byte
            dies = limit_bytes is not None and self._bytes_written + part.total_bytes > limit_bytes
            if dies:
                assert limit_bytes is not None
                part, _ = cut_at_byte(part, limit_bytes - self._bytes_written)
                write.error = self._error("this end has died", "closed", peer=write.peer)
            self._bytes_written += part.total_bytes
            self._inner.write(write.peer, part).add_done_callback(
                lambda done, write=write: self._end_part(write, done)
            )
            if dies:
                self._die()
                return

    def _next(self) -> tuple[_Write, Runs] | None:
        with self._changed:
            while self._due or not self._closed:
                wait_seconds = self._due[0][0] - time.monotonic() if self._due else None
                if wait_seconds is not None and wait_seconds <= 0:
                    _, _, write, part = heapq.heappop(self._due)
                    return write, part
                self._changed.wait(wait_seconds)
            return None

    def _end_part(self, write: _Write, done: Future[int]) -> None:
        error = done.exception()
        with self._changed:
            if isinstance(error, TransferError) and write.error is None:
                write.error = error
            write.parts_left -= 1
            if write.parts_left:
                return
            self._under_way_from[write.local_region] -= 1
            self._under_way_to[write.peer] -= 1
            self._changed.notify_all()
        if write.answered:
            return
        if write.error is None:
            write.future.set_result(write.total_bytes)
        else:
            write.future.set_exception(write.error)

    def _die(self) -> None:
        with self._changed:
            self._dead = True
            unsent, self._due = self._due, []
        for _, _, write, _ in unsent:
            self._end_part(write, self._refused("this end has died", "closed", write.peer))
        self._died()

    # Errors ----------------------------------------------------------------------------------

    def _wait_for(self, ended: Callable[[], bool]) -> None:
        if not self._changed.wait_for(ended, DRAIN_SECONDS):
            raise self._error("a write has not ended", "in_use", quiescent=False)

    def _refused(self, what: str, kind: str, peer: str) -> Future[int]:
        future: Future[int] = Future()
        future.set_exception(self._error(what, kind, peer=peer))
        return future

    def _error(
        self, what: str, kind: str, *, peer: str | None = None, quiescent: bool = True
    ) -> TransferError:
        return TransferError(what, kind=kind, peer=peer or self.session_id, quiescent=quiescent)

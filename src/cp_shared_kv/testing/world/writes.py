"""Writes from ranks into decode workers' pages that may still land, whatever was said of them."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass, field

from cp_shared_kv.errors import TransferError
from cp_shared_kv.testing.world.holders import Holder, Receiver
from cp_shared_kv.testing.world.memory import POOL_SPEC
from cp_shared_kv.transfer.transport import Runs


@dataclass(eq=False)
class Write:
    """One write of a rank for a room. `future` is what its rank knows of it."""

    rank: Holder
    decode: Receiver
    room: int
    runs: Runs
    future: Future[int] = field(default_factory=Future[int])
    landed_runs: int = 0

    @property
    def destinations(self) -> set[int]:
        """Decode's pages that it writes."""
        page_bytes = POOL_SPEC.page_bytes("latent")
        area_bytes = page_bytes * (self.decode.memory.pool.physical_pages + 1)
        pages: set[int] = set()
        for offset, nbytes in zip(
            self.runs.remote_offset_bytes.tolist(), self.runs.nbytes.tolist(), strict=True
        ):
            if offset < area_bytes:  # the first layer has all of them
                pages.update(range(offset // page_bytes, (offset + nbytes) // page_bytes))
        return pages

    def land(self, share: float = 1.0) -> bool:
        """Bytes arrive, run by run, up to that share of the runs. The source is read now.

        Returns whether any did.
        """
        stop = round(share * self.runs.count)
        landed = self.decode.alive and stop > self.landed_runs
        if self.decode.alive:
            for i in range(self.landed_runs, stop):
                n = int(self.runs.nbytes[i])
                local = int(self.runs.local_offset_bytes[i])
                remote = int(self.runs.remote_offset_bytes[i])
                self.decode.memory.bytes[remote : remote + n] = self.rank.memory.bytes[
                    local : local + n
                ]
        self.landed_runs = max(self.landed_runs, stop)
        return landed

    def damage(self, rng: random.Random) -> None:
        """One bit of what has landed changes."""
        run = rng.randrange(self.runs.count)
        place = int(self.runs.remote_offset_bytes[run]) + rng.randrange(int(self.runs.nbytes[run]))
        if self.decode.alive:
            self.decode.memory.bytes[place] ^= 1 << rng.randrange(8)

    def succeed(self) -> None:
        """Its rank hears that all of it has landed."""
        if not self.future.done():
            self.future.set_result(self.runs.total_bytes)

    def fail(self, what: str, kind: str, *, quiescent: bool) -> None:
        """Its rank hears that it broke."""
        if not self.future.done():
            error = TransferError(what, kind=kind, peer=self.decode.name, quiescent=quiescent)
            self.future.set_exception(error)


class Writes:
    """All writes of a world that may still land."""

    def __init__(self) -> None:
        self._open: dict[Write, None] = {}

    def add(self, write: Write) -> None:
        """It has begun."""
        self._open[write] = None

    def over(self, write: Write) -> None:
        """Nothing of it can land any more."""
        self._open.pop(write, None)

    def __contains__(self, write: Write) -> bool:
        return write in self._open

    def __len__(self) -> int:
        return len(self._open)

    def all(self) -> list[Write]:
        """In the order in which they began."""
        return list(self._open)

    def are_settled(self, decode: Receiver) -> bool:
        """Nothing of a dead rank can land at this worker any more."""
        return not any(w.decode is decode and not w.rank.alive for w in self._open)

    def of_rank(self, rank: Holder) -> list[Write]:
        """Those of one rank."""
        return [write for write in self._open if write.rank is rank]

    def between(self, rank: Holder, decode: Receiver) -> list[Write]:
        """Those of one rank to one decode worker."""
        return [write for write in self._open if write.rank is rank and write.decode is decode]

"""What every transport keeps: one-sided writes between registered regions, with honest failures."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import LayoutError, TransferError
from cp_shared_kv.transfer.regions import Region

if TYPE_CHECKING:
    from cp_shared_kv.memory.buffers import Buffer


@dataclass(frozen=True)
class PeerInfo:
    """Where a peer's memory is: the session and regions of its Hello."""

    session_id: str
    regions: tuple[Region, ...]


@dataclass(frozen=True, eq=False)
class Runs:
    """Byte ranges to copy out of one local region into one remote region.

    Three int64[count] arrays: `nbytes[i]` bytes from `local_offset_bytes[i]` to
    `remote_offset_bytes[i]`. Destinations must not overlap. LayoutError unless the arrays are
    of one length; whether they lie inside the regions is for the transport to check.
    """

    local_region: str
    remote_region: str
    local_offset_bytes: npt.NDArray[np.int64]
    remote_offset_bytes: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        arrays = (self.local_offset_bytes, self.remote_offset_bytes, self.nbytes)
        if any(array.dtype != np.int64 or array.shape != (self.count,) for array in arrays):
            raise LayoutError(
                "byte ranges of different shape",
                value=[f"{array.dtype}{list(array.shape)}" for array in arrays],
                allowed="three int64 arrays of one length",
            )

    @property
    def count(self) -> int:
        """Descriptors: the ranges as the transport is given them."""
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        """Bytes to move."""
        return int(self.nbytes.sum())


class KVTransport(Protocol):
    """The sending end: one-sided writes of KV bytes. Safe to call from several threads.

    `connect`, `revive` and `disconnect` may wait for the peer, and never long for another one: a
    caller that has other work makes them elsewhere, one at a time for each peer, and for several
    peers at once. `write`, `register` and `unregister` wait for no peer; they may come meanwhile
    from another thread, `write` to the very peer too. `close` comes when all other calls have
    ended.

    Failures are TransferError, whose `kind` is one of: `closed`, `unknown_peer`, `unreachable`,
    `unknown_region`, `local_range`, `remote_range`, `in_use`, `conflict`; a transport may add
    its own. Its `quiescent` decides whether the pages of the write may be reused. False: they
    may once `revive` has returned True for that peer, or `disconnect` has returned.
    """

    @property
    def session_id(self) -> str:
        """What peers know this end as; carries its epoch."""
        ...

    def register(self, buffer: Buffer) -> Region:
        """Let writes read from `buffer`. It must stay open until it is unregistered."""
        ...

    def unregister(self, region: Region) -> None:
        """Forget a region. Raises TransferError (`in_use`) while a write reads from it."""
        ...

    def connect(self, peer: PeerInfo) -> None:
        """Reach a peer's regions; after its handshake. Again with the same PeerInfo: no effect.

        May wait for the peer, for a bounded time. After a failure `disconnect` it.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer. On return no write to it can land any more. Unknown: no effect.

        Waits for what is under way to it, for a bounded time.
        TransferError (`in_use`, not quiescent) if that cannot be had in bounded time: nothing
        more is submitted to the peer, and the call may be repeated.
        """
        ...

    def write(self, peer: str, runs: Runs) -> Future[int]:
        """Copy `runs` to the session `peer`. The future gives the bytes that landed, all of them.

        Never raises TransferError itself: the future does. Every range is checked against what
        is registered here and there before the first byte moves.
        """
        ...

    def revive(self, peer: str) -> bool:
        """Try a peer that was unreachable again, without waiting long: call it from time to time.

        True: it can be written to now, and of all writes that had failed before this call none can
        land any more. Of one that fails during the call, True says nothing.
        """
        ...

    def close(self) -> None:
        """Forget all. On return no write of this end can land any more. Again: no effect.

        TransferError as of `disconnect`; the transport takes no more writes all the same.
        """
        ...


class KVTarget(Protocol):
    """The receiving end: memory that peers may write to. Safe to call from several threads."""

    @property
    def session_id(self) -> str:
        """What senders connect to; for Hello."""
        ...

    @property
    def regions(self) -> tuple[Region, ...]:
        """All that senders need to know of this end's memory, for Hello: first what was exposed,
        in that order."""
        ...

    def expose(self, buffer: Buffer) -> Region:
        """Let peers write to `buffer`. It must stay open until this end is closed."""
        ...

    def connections(self) -> frozenset[str]:
        """The ways on which something of any sender may come at this moment; for `settled`."""
        ...

    def settled(self, before: Collection[str] = ()) -> bool:
        """True: of what senders wrote whose processes have ended, nothing can land any more.

        Ask before the pages of a dead sender's rooms are reused; while False, ask again. If it may
        have been on another host, `before` are the `connections` of a moment after its death.
        """
        ...

    def close(self) -> None:
        """Name and serve the memory no more. Again: no effect.

        On return nothing can land that needs this end's help; a sender that has mapped the
        memory must have disconnected or ended before the memory is used for anything else.
        """
        ...


def first_outside(
    offset_bytes: npt.NDArray[np.int64], nbytes: npt.NDArray[np.int64], region_bytes: int
) -> int | None:
    """Index of the first range that is empty, or not wholly inside 0..region_bytes.

    Nothing is added up, so no pair of int64 values can wrap around into the region.
    """
    inside = (
        (offset_bytes >= 0)
        & (nbytes > 0)
        & (nbytes <= region_bytes)
        & (offset_bytes <= region_bytes - nbytes)
    )
    return None if inside.all() else int(np.argmin(inside))


def check_ranges(
    side: Literal["local", "remote"],
    peer: str,
    offset_bytes: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    region_bytes: int,
) -> None:
    """Raise TransferError (`local_range`, `remote_range`) unless all ranges are in the region."""
    bad = first_outside(offset_bytes, nbytes, region_bytes)
    if bad is not None:
        raise TransferError(
            f"{side} range {bad} is outside its region of {region_bytes} bytes",
            kind=f"{side}_range",
            peer=peer,
            quiescent=True,
            value=f"{nbytes[bad]} bytes at {offset_bytes[bad]}",
        )

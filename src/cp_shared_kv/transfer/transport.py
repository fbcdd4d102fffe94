"""What every transport keeps: one-sided writes between registered regions, with honest failures."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import LayoutError
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
    """One-sided writes of KV bytes. Safe to call from several threads.

    Failures are TransferError, whose `kind` is one of: `closed`, `unknown_peer`, `unreachable`,
    `unknown_region`, `local_range`, `remote_range`, `in_use`, `conflict`; a transport may add
    its own. Its `quiescent` decides whether the pages of the write may be reused.
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
        """Reach a peer's regions; after its handshake. Again with the same PeerInfo: no effect."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer. On return no write to it can land any more. Unknown: no effect."""
        ...

    def write(self, peer: str, runs: Runs) -> Future[int]:
        """Copy `runs` to the session `peer`. The future gives the bytes that landed, all of them.

        Never raises TransferError itself: the future does. Every range is checked against what
        is registered here and there before the first byte moves.
        """
        ...

    def revive(self, peer: str) -> bool:
        """Try a peer that was unreachable again. True: it can be written to now."""
        ...

    def close(self) -> None:
        """Forget all. On return no write of this end can land any more. Again: no effect."""
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

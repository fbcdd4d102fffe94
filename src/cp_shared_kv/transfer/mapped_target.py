"""The receiving end of a transport whose senders map the memory and copy by themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import Buffer
from cp_shared_kv.transfer.regions import Region


class MappedTarget(ABC):
    """A KVTarget within one host, all but how its memory is named to peers.

    A write is a copy by the sender's own hand, so a sender that has ended writes no more.
    """

    def __init__(self, session_id: str) -> None:
        self._session_id = session_id
        self._regions: list[Region] = []

    @abstractmethod
    def _region(self, buffer: Buffer) -> Region | None:
        """What peers map a buffer by; None for memory that they cannot map."""

    @property
    def session_id(self) -> str:
        """What senders connect to."""
        return self._session_id

    @property
    def regions(self) -> tuple[Region, ...]:
        """The exposed buffers, in the order in which they were exposed."""
        return tuple(self._regions)

    def expose(self, buffer: Buffer) -> Region:
        """Name a buffer to peers. `conflict` for memory that they cannot map, and for a name that
        was exposed before."""
        region = self._region(buffer)
        if region is None:
            raise self._conflict("memory that peers cannot map", type(buffer).__name__)
        if any(region.name == other.name for other in self._regions):
            raise self._conflict("memory of this name is exposed already", region.name)
        self._regions.append(region)
        return region

    def connections(self) -> frozenset[str]:
        """None: senders write by themselves."""
        return frozenset()

    def settled(self, before: Collection[str] = ()) -> bool:  # noqa: ARG002
        """Always: nothing is ever under way without its sender."""
        return True

    def close(self) -> None:
        """Name no buffer any more. Peers keep what they have mapped."""
        self._regions.clear()

    def _conflict(self, what: str, value: str) -> TransferError:
        return TransferError(
            what, kind="conflict", peer=self._session_id, quiescent=True, value=value
        )

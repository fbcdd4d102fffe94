"""One host: the peer's pool is mapped into this process, and a write is a copy."""

from __future__ import annotations

from collections.abc import Collection

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import Buffer, SharedMemoryBuffer
from cp_shared_kv.transfer.local_regions import Memory, host_bytes
from cp_shared_kv.transfer.mapped_transport import Ended, MappedTransport
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.strided_copy import copy_runs
from cp_shared_kv.transfer.transport import Runs


class SharedMemoryTransport(MappedTransport[Memory, Memory]):
    """KVTransport between processes of one host and user.

    The peer's regions are POSIX shared-memory segments, mapped by name on `connect`; their owner
    may unlink the names after that. A write runs in the caller's thread with the GIL released,
    so its future is done when it returns, and it either lands in full or touches nothing: every
    TransferError of `write` is quiescent.
    """

    def __init__(self, session_id: str) -> None:
        super().__init__(session_id, host_bytes)

    def _attach(self, region: Region) -> Memory:
        return SharedMemoryBuffer.attach(region.name, region.nbytes).tensor.numpy()

    def _detach(self, memory: Memory) -> None:
        """Nothing: the mapping ends with the last reference to it."""

    def _copy(self, local: Memory, remote: Memory, runs: Runs, ended: Ended) -> None:
        copy_runs(local, remote, runs.local_offset_bytes, runs.remote_offset_bytes, runs.nbytes)
        ended(None)


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

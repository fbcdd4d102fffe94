"""One host: the peer's pool is mapped into this process, and a write is a copy."""

from __future__ import annotations

from cp_shared_kv.memory.buffers import Buffer, SharedMemoryBuffer
from cp_shared_kv.transfer.local_regions import Memory, host_bytes
from cp_shared_kv.transfer.mapped_target import MappedTarget
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


class SharedMemoryTarget(MappedTarget):
    """KVTarget of one host: peers map the segments by name. Private memory has none."""

    def _region(self, buffer: Buffer) -> Region | None:
        return None if buffer.name is None else Region(buffer.name, buffer.nbytes)

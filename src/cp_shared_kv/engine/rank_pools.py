"""The pools of one epoch as one rank sees them: its own, and its peers' mapped beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_shared_kv.errors import CapacityError, CpkvError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.memory.buffers import Buffer, PrivateBuffer, SharedMemoryBuffer
from cp_shared_kv.memory.mapped_buffers import MappedBuffer
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.memory.process_bytes import raise_if_any_failed
from cp_shared_kv.memory.symmetric_buffers import gpu_buffer
from cp_shared_kv.reads.group import CPGroup, GpuGroup


@dataclass
class RankPools:
    """A rank's pool, and its peers' pools by rank where it can read them in place."""

    layout: CpSharedKVLayout
    pool: KVPool
    peers: list[KVPool]
    """All pools of the group by rank, this rank's own included; just its own when replicated, and
    on GPUs, where the pool's buffer knows its peers."""

    @classmethod
    def make_shared(
        cls, spec: KVPoolSpec, physical_pages: int, group: CPGroup, names: list[str]
    ) -> RankPools:
        """Make this rank's segment and map all others. Collective; `names` are by rank.

        If any rank cannot make or map a segment, every rank raises and none is left behind.
        """
        layout = CpSharedKVLayout(
            spec.page_size, group.cp_size, group.cp_rank, physical_pages=physical_pages
        )
        nbytes = spec.pool_bytes(physical_pages)
        mine: SharedMemoryBuffer | None = None
        buffers: list[SharedMemoryBuffer] = []
        failure: CpkvError | None = None
        try:
            mine = SharedMemoryBuffer.create(names[group.cp_rank], nbytes)
        except CpkvError as error:
            failure = error
        try:
            _agree(group, failure, "make its pool")
            try:
                for rank, name in enumerate(names):
                    own = rank == group.cp_rank
                    buffers.append(mine if own else SharedMemoryBuffer.attach(name, nbytes))  # type: ignore[arg-type]
            except CpkvError as error:
                failure = error
            _agree(group, failure, "map its peers' pools")
        finally:
            # All have mapped it, or the start has failed: no name needs to stay.
            if mine is not None:
                mine.unlink()
        peers = [KVPool(spec, physical_pages, buffer) for buffer in buffers]
        return cls(layout, peers[group.cp_rank], peers)

    @classmethod
    def make_on_gpus(
        cls, spec: KVPoolSpec, physical_pages: int, group: GpuGroup, device: torch.device
    ) -> RankPools:
        """Make this rank's pool on its GPU, mapped by all others where they can. Collective.

        If any rank has too little memory, every rank raises.
        """
        layout = CpSharedKVLayout(
            spec.page_size, group.cp_size, group.cp_rank, physical_pages=physical_pages
        )
        nbytes = spec.pool_bytes(physical_pages)
        torch.cuda.empty_cache()  # what an earlier epoch had is for this one to take
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        failure: CpkvError | None = None
        if free_bytes < nbytes:
            failure = CapacityError(
                f"too little memory on {device} for this rank's pool",
                value=f"{nbytes} bytes wanted",
                allowed=f"{free_bytes} bytes free of {total_bytes}",
                change="lower --max-total-tokens",
            )
        _agree(group, failure, "make its pool")
        buffer: Buffer
        if group.ranks_share_gpus:
            buffer = MappedBuffer.create(nbytes, group.gpu_process_group, device)
        else:
            buffer = gpu_buffer(nbytes, group.host_process_group, device)
        pool = KVPool(spec, physical_pages, buffer)
        return cls(layout, pool, [pool])

    @classmethod
    def make_replicated(
        cls, spec: KVPoolSpec, physical_pages: int, device: torch.device | None = None
    ) -> RankPools:
        """A pool that holds every page, as ranks have today; nobody else reads it."""
        layout = CpSharedKVLayout(spec.page_size, 1, 0, physical_pages=physical_pages)
        buffer: Buffer = PrivateBuffer(spec.pool_bytes(physical_pages), device)
        pool = KVPool(spec, physical_pages, buffer)
        return cls(layout, pool, [pool])

    def close(self) -> None:
        """Give all mappings up."""
        for pool in self.peers:
            pool.buffer.close()


def _agree(group: CPGroup, failure: CpkvError | None, what: str) -> None:
    flags = torch.empty((group.cp_size, 1), dtype=torch.uint8)
    group.all_gather_bytes(torch.tensor([failure is not None], dtype=torch.uint8), flags)
    raise_if_any_failed(failure, [bool(flag) for flag in flags.flatten()], what)

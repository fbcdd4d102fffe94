"""The whole prefix by one kernel on each rank, which writes its pages to every rank's scratch."""

from __future__ import annotations

import torch

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.kernels import ALIGNMENT_BYTES, WORD_BYTES
from cp_shared_kv.memory.device_copy import to_device
from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.reads.peer_pull import symmetric_buffer
from cp_shared_kv.reads.plan import PagesByOwner, ReadPlan
from cp_shared_kv.reads.symmetric_scratch import SymmetricScratch


class PeerPushReader:
    """Each owner sends its pages to all. Faster than pulling, but all ranks must come along.

    `read` is collective, on the current stream, where it waits for everybody's pages. It must not
    overwrite what a rank still reads: that is given where the ranks have exchanged their chunk
    since, on the same stream; for a batch without new tokens it waits beforehand, too. The host
    waits for nothing.
    """

    def __init__(self, cp_rank: int, pool: KVPool, scratch: SymmetricScratch) -> None:
        """pool: this rank's, in a buffer that all ranks have mapped."""
        self._rank = cp_rank
        self._pool = pool
        self._buffer = symmetric_buffer(pool)
        self._scratch = scratch
        self._device = pool.buffer.tensor.device
        self._plan: ReadPlan | None = None
        self._own_pages = torch.empty(0, dtype=torch.int64)
        self._distances: dict[int, torch.Tensor] = {}
        self.pages_read = 0
        self.bytes_read = 0

    def begin(self, plan: ReadPlan) -> None:
        self._plan = plan
        own_pages = plan.physical_pages[plan.owner_range(self._rank)]
        self._own_pages = to_device(own_pages, self._device)
        self._distances.clear()

    def read(self, kind: PageKind, layer: int, pages: PagesByOwner, scratch: torch.Tensor) -> None:
        # Here, since without a GPU there need not be a triton.
        from cp_shared_kv.kernels.push_pages import push_pages

        plan = self._plan
        assert plan is not None, "begin comes first"
        plan.check_is_whole(pages)
        distances = self._scratch_distances(scratch)
        if len(plan.new_locs) == 0:
            self._buffer.barrier()
        push_pages(
            self._pool.pages(kind, layer),
            self._own_pages,
            scratch,
            plan.owner_starts[self._rank],
            distances,
            self._rank,
        )
        self._buffer.barrier()
        self.pages_read += len(plan.logical_pages)
        self.bytes_read += len(plan.logical_pages) * scratch.shape[1]

    def _scratch_distances(self, scratch: torch.Tensor) -> torch.Tensor:
        """i64[N] words to each rank's scratch; looked up once a forward for each scratch."""
        address = scratch.data_ptr()
        if address not in self._distances:
            distances = self._scratch.peer_distances_bytes(scratch)
            if any(length % ALIGNMENT_BYTES for length in (scratch.shape[1], *distances)):
                raise ConfigError(
                    "bytes of a page that is written to peers",
                    value=scratch.shape[1],
                    allowed=f"multiples of {ALIGNMENT_BYTES}",
                    change="take a page size that is a multiple of 16 tokens",
                )
            words = [distance // WORD_BYTES for distance in distances]
            self._distances[address] = to_device(torch.tensor(words), self._device)
        return self._distances[address]

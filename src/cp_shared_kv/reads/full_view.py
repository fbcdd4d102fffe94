"""The whole prefix by a collective: an all-gather of page bytes, on any group."""

from __future__ import annotations

import torch

from cp_shared_kv.memory.page_format import PAGE_KINDS, PageKind
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.reads.gather_rounds import PAGES_PER_ROUND
from cp_shared_kv.reads.group import CPGroup
from cp_shared_kv.reads.plan import PagesByOwner, ReadPlan
from cp_shared_kv.reads.scratch import Scratch


class FullViewReader:
    """Every rank packs the pages it owns, all gather them, and each keeps all of them.

    A gather takes as many pages from each rank as from the busiest owner. It goes in rounds, so
    that what it needs beside scratch depends on neither the prefix nor the balance of owners.
    """

    def __init__(self, group: CPGroup, pool: KVPool, scratch: Scratch) -> None:
        self._group = group
        self._pool = pool
        self._scratch = scratch
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.pages_read = 0
        self.bytes_read = 0

    def begin(self, plan: ReadPlan) -> None:
        """Take the buffer of a round; the collectives of the reads keep the ranks in step."""
        pages = min(plan.busiest_owner_pages, PAGES_PER_ROUND) * (self._group.cp_size + 1)
        page_bytes = max(self._pool.spec.page_bytes(kind) for kind in PAGE_KINDS)
        self._buffer = self._scratch.take("full view", pages * page_bytes)

    def read(self, kind: PageKind, layer: int, pages: PagesByOwner, scratch: torch.Tensor) -> None:
        page_bytes = scratch.shape[1]
        pool_pages = self._pool.pages(kind, layer)
        owned = pages.physical_pages[pages.owner_range(self._group.cp_rank)]
        for first in range(0, pages.busiest_owner_pages, PAGES_PER_ROUND):
            count = min(PAGES_PER_ROUND, pages.busiest_owner_pages - first)
            round_bytes = count * page_bytes
            packed = self._buffer[:round_bytes]
            gathered = self._buffer[round_bytes : round_bytes * (self._group.cp_size + 1)]
            sent = owned[first : first + count]
            torch.index_select(pool_pages, 0, sent, out=packed.view(count, page_bytes)[: len(sent)])
            self._group.all_gather_bytes(packed, gathered.view(-1, round_bytes))
            received = gathered.view(-1, count, page_bytes)
            for owner in range(self._group.cp_size):
                places = pages.owner_range(owner)
                kept = scratch[places][first : first + count]
                kept.copy_(received[owner, : len(kept)])
        self.pages_read += len(pages.logical_pages)
        self.bytes_read += len(pages.logical_pages) * page_bytes

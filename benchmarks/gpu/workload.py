"""DeepSeek-V3.2's pages on each rank's GPU, and prefixes of shuffled pages in them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.gpu.rank import GpuRank
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.memory.symmetric_buffers import SymmetricBuffer
from cp_shared_kv.reads.page_sources import PageSources
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan

PAGE_SIZE = 64
LATENT, ROPE, INDEX = 512, 64, 128
LAYERS = 2
INDEX_TOPK = 2048

CACHED_BYTES = 3 << 26
"""Well above an H200's L2 cache."""


def sets_past_the_cache(nbytes: int) -> int:
    """How many sets of data of so many bytes to go round, so that none comes from the cache."""
    return min(24, max(2, -(-CACHED_BYTES // nbytes)))


def production_spec(latent_name: str) -> KVPoolSpec:
    """Latent pages in the format of that name, index K in fp8_scaled."""
    latent = latent_format(
        latent_name, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, page_size=PAGE_SIZE
    )
    index = index_format("fp8_scaled", index_head_dim=INDEX, page_size=PAGE_SIZE)
    return KVPoolSpec(latent, index, LAYERS, tuple(range(LAYERS)))


@dataclass
class Workload:
    """A rank's pool of random bytes, mapped by its peers."""

    rank: GpuRank
    pool: KVPool
    buffer: SymmetricBuffer
    layout: CpSharedKVLayout

    @classmethod
    def make(cls, rank: GpuRank, latent_name: str, tokens: int) -> Workload:
        """A pool whose group holds `tokens` logical tokens. Collective."""
        spec, cp_size = production_spec(latent_name), rank.context.size
        physical_pages = tokens // PAGE_SIZE // cp_size
        buffer = rank.buffer(spec.pool_bytes(physical_pages))
        buffer.tensor.random_(0, 256)
        buffer.barrier()
        layout = CpSharedKVLayout(
            PAGE_SIZE, cp_size, rank.context.rank, physical_pages=physical_pages
        )
        return cls(rank, KVPool(spec, physical_pages, buffer), buffer, layout)

    def plan(self, tokens: int, seed: int) -> ReadPlan:
        """A prefix of so many tokens, every owner with equally many pages, in random order.

        A plan lists an owner's pages ascending, which makes neighbours of some: shuffled here, so
        that no reader profits from it.
        """
        random, cp_size = np.random.default_rng(seed), self.layout.cp_size
        each = tokens // PAGE_SIZE // cp_size
        pages = [random.permutation(self.pool.physical_pages)[:each] + 1 for _ in range(cp_size)]
        logical = [
            self.layout.physical_pages_to_logical(of_owner, owner)
            for owner, of_owner in enumerate(pages)
        ]
        span = BatchSpan(LogicalPages(np.concatenate(logical)), tokens, 0)
        plan = ReadPlan.build(self.layout, [span])
        return replace(
            plan,
            logical_pages=LogicalPages(np.concatenate(logical)),
            physical_pages=torch.from_numpy(np.concatenate(pages)),
        )

    def sources(self, plan: ReadPlan, kind: PageKind) -> PageSources:
        return PageSources.build(
            plan,
            self.layout.cp_rank,
            self.buffer.peer_distances_bytes,
            self.pool.spec.page_bytes(kind),
            self.rank.device,
        )

    def peer_pages(self, peer: int, kind: PageKind, layer: int) -> torch.Tensor:
        """u8[P + 1, page_bytes]: a peer's pages of a layer, in place."""
        page_bytes = self.pool.spec.page_bytes(kind)
        start = self.pool.page_offset_bytes(kind, layer)
        nbytes = (self.pool.physical_pages + 1) * page_bytes
        return self.buffer.peer(peer)[start : start + nbytes].view(-1, page_bytes)

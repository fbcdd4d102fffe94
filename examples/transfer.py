"""From four prefill ranks to one decode pool: whole runs of pages instead of page by page."""

from __future__ import annotations

import os

import numpy as np
import torch

from cp_shared_kv import CpSharedKVLayout
from cp_shared_kv.layout import ExactCover, LogicalPages, PhysicalPages, Positions
from cp_shared_kv.memory.buffers import PrivateBuffer, SharedMemoryBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.transfer.descriptors import PageAreas, expand, merge_pages, stripe_destinations
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.shared_memory import SharedMemoryTransport
from cp_shared_kv.transfer.transport import PeerInfo

# Two layers of a toy model, both with index K: four areas of pages in every pool.
latent = latent_format("fp32", kv_lora_rank=8, qk_rope_head_dim=4, page_size=4)
index = index_format("fp32", index_head_dim=4, page_size=4)
SPEC = KVPoolSpec(latent, index, num_layers=2, index_layers=(0, 1))
PROMPT, POSITIONS = LogicalPages(np.arange(1, 33)), Positions(np.arange(32))

# Decode's pool is shared memory that the ranks write to. Its name can go once they have mapped it.
target = SharedMemoryBuffer.create(f"cpkv-example-{os.getpid()}", SPEC.pool_bytes(40))
region = Region(str(target.name), target.nbytes)
ranks = [SharedMemoryTransport(f"rank-{rank}") for rank in range(4)]
for transport in ranks:
    transport.connect(PeerInfo("decode", (region,)))
target.unlink()
pools = [KVPool(SPEC, 8, PrivateBuffer(SPEC.pool_bytes(8))) for _ in ranks]
for rank, pool in enumerate(pools):
    pool.buffer.tensor.fill_(rank + 1)  # so that the bytes tell who sent them


def send(destinations: PhysicalPages) -> None:
    """Every rank sends the pages it owns; destinations[i] is decode's page for position i."""
    target.tensor.zero_()
    descriptors, nbytes, cover = 0, 0, ExactCover(len(PROMPT))
    for rank, (transport, pool) in enumerate(zip(ranks, pools, strict=True)):
        layout = CpSharedKVLayout(page_size=4, cp_size=4, cp_rank=rank, physical_pages=8)
        sources, positions = layout.filter_owned_pages(PROMPT, POSITIONS)
        pairs = merge_pages(sources, PhysicalPages(destinations[positions]))
        areas = PageAreas.between(SPEC, local_physical_pages=8, remote_physical_pages=40)
        local = transport.register(pool.buffer)
        runs = expand(pairs, areas, local_region=local.name, remote_region=region.name)
        nbytes += transport.write("decode", runs).result()
        transport.unregister(local)
        descriptors += runs.count
        cover.add(positions, f"rank {rank}")  # refuses a position that came before
    print(f"{descriptors} descriptors, {nbytes} bytes, every page once: {cover.complete}")
    arrived = KVPool(SPEC, 40, target).pages("latent", 0)[torch.from_numpy(destinations), 0]
    print("the first eight pages came from ranks", (arrived[:8] - 1).tolist())


free = PhysicalPages(np.arange(1, 33))  # of decode's 40 pages
send(free)  # in order of position: a rank's neighbours land four pages apart, nothing merges
send(stripe_destinations(free, first_position=0, cp_size=4))  # now they land side by side

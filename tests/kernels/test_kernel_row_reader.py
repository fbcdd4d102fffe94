"""The reader of selected rows between GPUs gives what the one over shared memory gives."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.reads.page_sources import PageSources
from cp_shared_kv.reads.peer_pull import PeerPullReader
from cp_shared_kv.reads.plan import BatchSpan, PagesByOwner, ReadPlan
from cp_shared_kv.reads.pull_rows import PullRowsReader
from cp_shared_kv.reads.scratch import Scratch
from cp_shared_kv.reads.selected_rows import SelectedRowsReader

PAGE_SIZE, PHYSICAL_PAGES, NEW_TOKENS = 16, 9, 5


class Reaches:
    """Knows where all pools lie; stands for the page reader, whose buffer needs several GPUs."""

    def __init__(self, pools: list[KVPool], cp_rank: int) -> None:
        own = pools[cp_rank].buffer.tensor.data_ptr()
        self._distances = [pool.buffer.tensor.data_ptr() - own for pool in pools]
        self._rank, self._pool = cp_rank, pools[cp_rank]

    def sources(self, pages: PagesByOwner, kind: PageKind) -> PageSources:
        device = self._pool.buffer.tensor.device
        page_bytes = self._pool.spec.page_bytes(kind)
        return PageSources.build(pages, self._rank, self._distances, page_bytes, device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("cp_size", "cp_rank", "prefix_pages"), [(2, 0, 11), (3, 2, 20), (2, 1, 0)]
)
@pytest.mark.parametrize("latent", ["bf16", "fp8_ds_mla"])
def test_rows_and_places_are_those_of_the_reader_over_shared_memory(
    device: torch.device,
    latent: str,
    cp_size: int,
    cp_rank: int,
    prefix_pages: int,
    dtype: torch.dtype,
) -> None:
    spec = KVPoolSpec(
        latent_format(latent, kv_lora_rank=512, qk_rope_head_dim=64, page_size=PAGE_SIZE),
        index_format("fp8_scaled", index_head_dim=128, page_size=PAGE_SIZE),
        num_layers=2,
        index_layers=(0,),
    )
    rng = np.random.default_rng(cp_size)
    pools: list[KVPool] = []
    for _ in range(cp_size):
        buffer = PrivateBuffer(spec.pool_bytes(PHYSICAL_PAGES), device)
        drawn = rng.integers(0, 256, buffer.nbytes, dtype=np.uint8)
        buffer.tensor.copy_(torch.from_numpy(drawn))
        pools.append(KVPool(spec, PHYSICAL_PAGES, buffer))
    layout = CpSharedKVLayout(PAGE_SIZE, cp_size, cp_rank, physical_pages=PHYSICAL_PAGES)
    pages = LogicalPages(rng.permutation(cp_size * PHYSICAL_PAGES)[: prefix_pages + 1] + 1)
    span = BatchSpan(pages, prefix_pages * PAGE_SIZE, NEW_TOKENS)
    plan = ReadPlan.build(layout, [span]).to(device)
    slots = prefix_pages * PAGE_SIZE
    chunk = torch.from_numpy(rng.integers(0, 256, (NEW_TOKENS, spec.latent.row_bytes), np.uint8))
    chunk = chunk.to(device)
    reader = SelectedRowsReader(
        cast(PeerPullReader, Reaches(pools, cp_rank)),
        cp_size,
        pools[cp_rank],
        Scratch(1 << 30, device),
    )
    host_pools = [on_host(pool) for pool in pools]
    reference = PullRowsReader(host_pools, Scratch(1 << 30))
    reader.begin(plan, slots)
    reference.begin(ReadPlan.build(layout, [span]), slots)
    for layer in (0, 1):
        selected = torch.from_numpy(rng.integers(-1, slots + NEW_TOKENS, (7, 30))).to(dtype)
        rows, places = reader.read(layer, selected.to(device), chunk)
        expected, expected_places = reference.read(layer, selected.long(), chunk.cpu())
        assert places.dtype == dtype
        assert torch.equal(places.cpu().long(), expected_places)
        assert torch.equal(rows[: len(expected)].cpu(), expected)


def on_host(pool: KVPool) -> KVPool:
    buffer = PrivateBuffer(pool.buffer.nbytes)
    buffer.tensor.copy_(pool.buffer.tensor)
    return KVPool(pool.spec, pool.physical_pages, buffer)

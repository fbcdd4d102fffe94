"""What a rank's reads have copied is counted, whole pages and single rows alike."""

from __future__ import annotations

import numpy as np
import torch

from cp_shared_kv.engine.rank_pools import RankPools
from cp_shared_kv.engine.readers import make_reader
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.reads.group import SoloGroup
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan

PAGE_SIZE = 4
SPEC = KVPoolSpec(
    latent_format("fp32", kv_lora_rank=4, qk_rope_head_dim=2, page_size=PAGE_SIZE),
    index_format("fp32", index_head_dim=3, page_size=PAGE_SIZE),
    num_layers=1,
    index_layers=(0,),
)


class FirstOfTwo(SoloGroup):
    """A rank that never waits for the other."""

    cp_size = 2


def test_pages_and_selected_rows_are_counted_together() -> None:
    layout = CpSharedKVLayout(PAGE_SIZE, 2, 0)
    peers = [KVPool(SPEC, 4, PrivateBuffer(SPEC.pool_bytes(4))) for _ in range(2)]
    reads = make_reader(
        "sparse", RankPools(layout, peers[0], peers), FirstOfTwo(), 1 << 20, index_topk=4
    )
    assert reads.bytes_read == 0
    pages = LogicalPages(np.arange(1, 5))
    plan = ReadPlan.build(layout, [BatchSpan(pages, 3 * PAGE_SIZE, 1)])
    index_bytes = SPEC.page_bytes("index")
    reads.reader.begin(plan)
    reads.reader.read("index", 0, plan, torch.empty(4, index_bytes, dtype=torch.uint8))
    assert reads.bytes_read == 3 * index_bytes
    assert reads.sparse is not None
    reads.sparse.rows.begin(plan, 5)
    chunk = torch.zeros(1, SPEC.latent.row_bytes, dtype=torch.uint8)
    reads.sparse.rows.read(0, torch.tensor([[0, 7, 7, -1], [11, 0, -1, -1]]), chunk)
    assert reads.bytes_read == 3 * index_bytes + 3 * SPEC.latent.row_bytes  # slots 0, 7 and 11

"""ForwardKV on one rank: what it refuses, and which objects it needs to agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cp_shared_kv.errors import CapacityError, ConfigError, InvariantError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.reads.forward_kv import BatchSpan, ForwardKV
from cp_shared_kv.reads.full_view import PAGES_PER_ROUND, FullViewReader
from cp_shared_kv.reads.group import SoloGroup
from cp_shared_kv.reads.plan import ReadPlan
from cp_shared_kv.reads.prefix_reader import LocalReader
from cp_shared_kv.reads.pull import PullReader
from cp_shared_kv.reads.scratch import Scratch

PAGES = LogicalPages(np.array([3, 1]))
SPEC = KVPoolSpec(
    latent_format("fp32", kv_lora_rank=4, qk_rope_head_dim=2, page_size=4),
    index_format("fp32", index_head_dim=3, page_size=4),
    num_layers=2,
    index_layers=(0,),
)


def make_pool(physical_pages: int = 4) -> KVPool:
    return KVPool(SPEC, physical_pages, PrivateBuffer(SPEC.pool_bytes(physical_pages)))


class OneOfMany:
    """Rank 0 of N on which the others are silent: nothing is gathered, barriers are counted."""

    cp_rank = 0

    def __init__(self, cp_size: int) -> None:
        self.cp_size = cp_size
        self.barriers = 0

    def all_gather_bytes(self, local: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("a read without pages, or a plan, is no reason for a collective")

    def barrier(self) -> None:
        self.barriers += 1


def solo(pool: KVPool, requests: list[BatchSpan], dtype: torch.dtype = torch.float32) -> ForwardKV:
    return ForwardKV.build(
        pool,
        CpSharedKVLayout(4, 1, 0, physical_pages=4),
        SoloGroup(),
        LocalReader(),
        requests,
        "round-robin-split",
        scratch=Scratch(limit_bytes=0),
        dtype=dtype,
    )


def test_one_rank_needs_no_scratch_and_reads_slots_of_any_shape_in_its_dtype() -> None:
    pool = make_pool()
    latent, k_pe, index_k = torch.randn(6, 4), torch.randn(6, 2), torch.randn(6, 3)
    kv = solo(pool, [BatchSpan(PAGES, 0, 6)], torch.bfloat16)
    kv.store(0, latent, k_pe, index_k)
    slots = kv.requests[0].slots[torch.tensor([[5, 0, 0], [2, 3, 4]])]
    order = torch.tensor([[5, 0, 0], [2, 3, 4]])
    read_latent, read_k_pe = kv.latent(0, slots)
    assert read_latent.dtype == read_k_pe.dtype == kv.dtype == torch.bfloat16
    assert torch.equal(read_latent, latent[order].bfloat16())
    assert torch.equal(read_k_pe, k_pe[order].bfloat16())
    (keys,) = kv.index_pieces(0)
    assert (keys.request, keys.start) == (0, 0)
    assert torch.equal(keys.keys, index_k.bfloat16())


def test_next_batch_reads_what_the_last_one_stored() -> None:
    pool = make_pool()
    values = torch.randn(7, 6)
    solo(pool, [BatchSpan(PAGES, 0, 5)]).store(1, values[:5, :4], values[:5, 4:], None)
    kv = solo(pool, [BatchSpan(PAGES, 5, 2)])
    assert kv.token_indices.tolist() == [0, 1]
    assert kv.positions.tolist() == [5, 6]
    kv.store(1, values[5:, :4], values[5:, 4:], None)
    assert torch.equal(torch.cat(kv.latent(1, kv.requests[0].slots), 1), values)


def test_only_the_layer_stored_last_can_be_read() -> None:
    kv = solo(make_pool(), [BatchSpan(PAGES, 0, 2)])
    slots = kv.requests[0].slots
    with pytest.raises(InvariantError, match="latent KV read of layer 0; allowed: nothing yet"):
        kv.latent(0, slots)
    kv.store(0, torch.zeros(2, 4), torch.zeros(2, 2), torch.zeros(2, 3))
    kv.latent(0, slots)
    kv.store(1, torch.zeros(2, 4), torch.zeros(2, 2), None)
    with pytest.raises(InvariantError, match="latent KV read of layer 0; allowed: that of layer 1"):
        kv.latent(0, slots)
    with pytest.raises(InvariantError, match="index KV read of layer 1"):
        kv.index_pieces(1)


def test_index_keys_come_with_the_layers_that_have_an_indexer_and_no_others() -> None:
    kv = solo(make_pool(), [BatchSpan(PAGES, 0, 2)])
    with pytest.raises(InvariantError, match="index K of layer 0: none"):
        kv.store(0, torch.zeros(2, 4), torch.zeros(2, 2), None)
    with pytest.raises(InvariantError, match="index K of layer 1: given"):
        kv.store(1, torch.zeros(2, 4), torch.zeros(2, 2), torch.zeros(2, 3))


def test_another_number_of_rows_than_this_rank_computes_is_refused() -> None:
    kv = solo(make_pool(), [BatchSpan(PAGES, 0, 2)])
    with pytest.raises(InvariantError, match="rows stored by this rank: 3; allowed: 2"):
        kv.store(1, torch.zeros(3, 4), torch.zeros(3, 2), None)


@pytest.mark.parametrize(
    "layout",
    [
        CpSharedKVLayout(4, 2, 0, physical_pages=4),
        CpSharedKVLayout(4, 1, 0, physical_pages=5),
        CpSharedKVLayout(4, 1, 0),
        CpSharedKVLayout(8, 1, 0, physical_pages=4),
    ],
    ids=["another group", "another pool size", "no pool size", "another page size"],
)
def test_layout_of_another_group_or_pool_is_refused(layout: CpSharedKVLayout) -> None:
    with pytest.raises(ConfigError, match="of the layout"):
        ForwardKV.build(
            make_pool(),
            layout,
            SoloGroup(),
            LocalReader(),
            [],
            "in-seq-split",
            scratch=Scratch(0),
        )


def test_local_read_of_a_sharded_pool_is_refused() -> None:
    plan = ReadPlan.build(CpSharedKVLayout(4, 2, 0), [])
    with pytest.raises(ConfigError, match="2 owners; allowed: --kv-read pull, push, collective"):
        LocalReader().begin(plan)


def test_pull_waits_for_all_ranks_once_a_forward_whatever_the_plan() -> None:
    group = OneOfMany(2)
    reader = PullReader(group, [make_pool(), make_pool()])
    for requests in ([], [BatchSpan(PAGES, 8, 0)]):
        reader.begin(ReadPlan.build(CpSharedKVLayout(4, 2, 0, physical_pages=4), requests))
    assert group.barriers == 2


def test_pull_counts_pages_and_bytes_and_leaves_the_rest_of_scratch_alone() -> None:
    pools = [make_pool(), make_pool()]
    for rank, pool in enumerate(pools):
        pool.buffer.tensor.fill_(rank + 1)
    reader = PullReader(OneOfMany(2), pools)
    plan = ReadPlan.build(
        CpSharedKVLayout(4, 2, 0, physical_pages=4),
        [BatchSpan(LogicalPages(np.array([4, 1, 5])), 12, 0)],
    )
    scratch = torch.zeros(4, SPEC.latent.page_bytes, dtype=torch.uint8)
    reader.read("latent", 1, plan, scratch)
    assert scratch.unique(dim=1).flatten().tolist() == [1, 1, 2, 0]
    assert (reader.pages_read, reader.bytes_read) == (3, 3 * SPEC.latent.page_bytes)


@pytest.mark.parametrize("pages", [[4], [4, 5], [4, 4, 4]])
def test_pools_that_are_not_the_groups_are_refused(pages: list[int]) -> None:
    with pytest.raises(ConfigError, match="2 pools of one shape"):
        PullReader(OneOfMany(2), [make_pool(count) for count in pages])


def test_full_view_without_prefix_pages_is_no_collective_and_takes_nothing() -> None:
    scratch = Scratch(limit_bytes=0)
    reader = FullViewReader(OneOfMany(2), make_pool(), scratch)
    plan = ReadPlan.build(CpSharedKVLayout(4, 2, 0), [BatchSpan(PAGES, 0, 8)])
    reader.begin(plan)
    reader.read("latent", 0, plan, torch.empty(2, SPEC.latent.page_bytes, dtype=torch.uint8))
    assert (reader.pages_read, scratch.bytes_in_use) == (0, 0)


def test_full_view_takes_the_same_for_any_long_prefix() -> None:
    scratch = Scratch(limit_bytes=1 << 20)
    reader = FullViewReader(OneOfMany(2), make_pool(), scratch)
    taken: list[int] = []
    for count in (1, PAGES_PER_ROUND, 10 * PAGES_PER_ROUND):
        odd = LogicalPages(np.arange(count) * 2 + 1)  # all of rank 0
        reader.begin(ReadPlan.build(CpSharedKVLayout(4, 2, 0), [BatchSpan(odd, count * 4, 0)]))
        taken.append(scratch.bytes_in_use)
    page_bytes = SPEC.latent.page_bytes
    assert taken == [3 * page_bytes, *[3 * PAGES_PER_ROUND * page_bytes] * 2]


def test_scratch_is_what_the_plan_needs_and_refused_before_any_collective() -> None:
    def build(limit_bytes: int, scratch_out: list[Scratch]) -> ForwardKV:
        scratch = Scratch(limit_bytes)
        scratch_out.append(scratch)
        group = OneOfMany(2)
        return ForwardKV.build(
            make_pool(),
            CpSharedKVLayout(4, 2, 0, physical_pages=4),
            group,
            PullReader(group, [make_pool(), make_pool()]),
            [BatchSpan(PAGES, 4, 3)],
            "round-robin-split",
            scratch=scratch,
        )

    row_bytes = SPEC.latent.row_bytes + SPEC.index.row_bytes
    # Two pages of scratch, one for the prefix and one for the chunk; the chunk's rows are sent
    # in shares of two, and gathered from two ranks.
    needed = 2 * 4 * row_bytes + (1 + 2) * 2 * row_bytes
    scratches: list[Scratch] = []
    kv = build(needed, scratches)
    assert scratches[0].bytes_in_use == needed
    assert kv.token_indices.tolist() == [0, 2]
    assert kv.positions.tolist() == [4, 6]
    with pytest.raises(CapacityError, match=rf"allowed: {needed - 1} bytes"):
        build(needed - 1, scratches)

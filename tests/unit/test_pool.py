"""The pool: where each layer's pages lie, and that a rank keeps its own rows only."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch

from cp_shared_kv.errors import CapacityError, ConfigError, LayoutError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalLocs, PhysicalPages
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_checksums import page_checksums
from cp_shared_kv.memory.page_format import PAGE_KINDS, PageKind
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec, WritePlan

POISON = 0xFF


def make_spec(
    page_size: int = 4, num_layers: int = 3, index_layers: tuple[int, ...] = (0, 2)
) -> KVPoolSpec:
    return KVPoolSpec(
        latent_format("fp32", kv_lora_rank=4, qk_rope_head_dim=2, page_size=page_size),
        index_format("fp32", index_head_dim=3, page_size=page_size),
        num_layers,
        index_layers,
    )


def poisoned_pool(spec: KVPoolSpec, physical_pages: int) -> KVPool:
    buffer = PrivateBuffer(spec.pool_bytes(physical_pages))
    buffer.tensor.fill_(POISON)
    return KVPool(spec, physical_pages, buffer)


def test_sizes_count_every_layer_that_has_pages_and_the_padding_page() -> None:
    spec = make_spec()
    assert spec.page_bytes("latent") == 4 * 24
    assert spec.page_bytes("index") == 4 * 12
    assert spec.bytes_per_page == 3 * 96 + 2 * 48
    assert spec.bytes_per_token == 3 * 24 + 2 * 12
    assert spec.pool_bytes(7) == 8 * spec.bytes_per_page


def test_layers_fill_the_buffer_without_gap_or_overlap() -> None:
    spec = make_spec()
    pool = poisoned_pool(spec, 5)
    places = [(kind, layer) for kind in PAGE_KINDS for layer in spec.layers(kind)]
    assert places == [("latent", 0), ("latent", 1), ("latent", 2), ("index", 0), ("index", 2)]
    end = 0
    for number, (kind, layer) in enumerate(places):
        pages = pool.pages(kind, layer)
        assert pages.shape == (6, spec.page_bytes(kind))
        assert pool.page_offset_bytes(kind, layer) == end
        assert pages.data_ptr() == pool.buffer.tensor.data_ptr() + end
        end += pages.numel()
        pages.fill_(number)
    assert end == pool.buffer.nbytes == spec.pool_bytes(5)
    assert pool.buffer.tensor.unique_consecutive().tolist() == list(range(len(places)))


@pytest.mark.parametrize(("kind", "layer"), [("index", 1), ("latent", 3), ("latent", -1)])
def test_layer_without_pages_is_refused_with_those_that_have_some(
    kind: PageKind, layer: int
) -> None:
    with pytest.raises(LayoutError, match=rf"layer without {kind} pages: {layer}; allowed: \(0, "):
        make_spec().page_offset_bytes(kind, layer, 5)


def test_model_without_indexers_has_latent_pages_alone() -> None:
    spec = make_spec(index_layers=())
    assert spec.bytes_per_page == 3 * spec.latent.page_bytes
    assert poisoned_pool(spec, 2).buffer.nbytes == 3 * spec.bytes_per_page


def test_buffer_that_is_too_small_is_refused_with_both_sizes() -> None:
    spec = make_spec()
    needed = spec.pool_bytes(5)
    with pytest.raises(CapacityError, match=rf"{needed - 1} bytes; allowed: {needed} bytes"):
        KVPool(spec, 5, PrivateBuffer(needed - 1))


@pytest.mark.parametrize("index_layers", [(2, 0), (0, 0), (3,), (-1,)])
def test_index_layers_the_model_has_not_are_refused(index_layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="index layers"):
        make_spec(index_layers=index_layers)


def test_kinds_of_different_page_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="page size of index K: 8; allowed: 4"):
        KVPoolSpec(
            latent_format("fp32", kv_lora_rank=4, qk_rope_head_dim=2, page_size=4),
            index_format("fp32", index_head_dim=3, page_size=8),
            1,
            (0,),
        )


def test_write_plan_of_the_check_values() -> None:
    # N = 4, page size 64: of these locs rank 2 owns 192 only, at physical loc 64.
    layout = CpSharedKVLayout(64, 4, 2, physical_pages=8)
    plan = WritePlan.build(layout, LogicalLocs(np.array([0, 64, 128, 192, 256, 320, 384])))
    assert plan.rows.tolist() == [3]
    assert plan.physical_locs.tolist() == [64]
    assert plan.rows.dtype == plan.physical_locs.dtype == torch.int64


def test_locs_past_32_bits_stay_exact() -> None:
    layout = CpSharedKVLayout(64, 8, 5)
    page = (1 << 40) - (1 << 40) % 8 + 6  # of rank 5
    plan = WritePlan.build(layout, LogicalLocs(np.array([page * 64 + 63, page * 64 + 64])))
    assert plan.rows.tolist() == [0]
    assert plan.physical_locs.tolist() == [((page - 1) // 8 + 1) * 64 + 63]


@pytest.mark.parametrize("stripe_pages", [1, 2])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_each_row_is_kept_by_its_owner_alone(cp_size: int, stripe_pages: int) -> None:
    spec, physical_pages = make_spec(page_size=2), 4
    locs = np.random.default_rng(cp_size).permutation(np.arange(2, 2 * 4 * cp_size + 2))[:9]
    locs = np.append(locs, [0, 1])  # the padding page's, kept by nobody
    rows = torch.randint(0, 255, (len(locs), spec.latent.row_bytes), dtype=torch.uint8)
    found: dict[int, list[list[int]]] = {int(loc): [] for loc in locs}
    for rank in range(cp_size):
        layout = CpSharedKVLayout(2, cp_size, rank, stripe_pages, physical_pages)
        pool = poisoned_pool(spec, physical_pages)
        plan = WritePlan.build(layout, LogicalLocs(locs))
        pool.write("latent", 1, rows, plan)
        places = pool.pages("latent", 1).reshape(-1, spec.latent.row_bytes)
        for loc in found:
            page, offset = divmod(loc, 2)
            if page and (page - 1) // stripe_pages % cp_size == rank:
                stripe = (page - 1) // (stripe_pages * cp_size)
                physical_page = stripe * stripe_pages + (page - 1) % stripe_pages + 1
                found[loc].append(places[physical_page * 2 + offset].tolist())
                places[physical_page * 2 + offset] = POISON
        assert (pool.buffer.tensor == POISON).all(), "nothing else was written"
    for number, loc in enumerate(locs):
        assert found[int(loc)] == ([rows[number].tolist()] if loc >= 2 else [])


def test_plan_of_a_rank_that_owns_nothing_writes_nothing() -> None:
    layout = CpSharedKVLayout(4, 4, 3, physical_pages=5)
    pool = poisoned_pool(make_spec(), 5)
    plan = WritePlan.build(layout, LogicalLocs(np.arange(4, 8)))  # logical page 1, of rank 0
    pool.write("index", 2, torch.zeros(4, 12, dtype=torch.uint8), plan)
    assert (pool.buffer.tensor == POISON).all()


def test_locs_outside_the_pool_are_refused() -> None:
    layout = CpSharedKVLayout(4, 2, 0, physical_pages=3)
    with pytest.raises(LayoutError, match="28"):
        WritePlan.build(layout, LogicalLocs(np.array([27, 28])))


def test_a_checksum_covers_every_byte_of_its_page_and_no_other() -> None:
    spec = make_spec()
    buffer = PrivateBuffer(spec.pool_bytes(5))
    buffer.tensor.random_(0, 256, generator=torch.Generator().manual_seed(1))
    pool = KVPool(spec, 5, buffer)
    pages = PhysicalPages(np.array([3, 1, 4]))
    before = page_checksums(pool, pages)
    assert before.dtype == np.int64
    assert len(set(before.tolist())) == 3
    assert page_checksums(pool, PhysicalPages(np.array([4]))).tolist() == [before[2]]
    seen = 0
    for kind in PAGE_KINDS:
        for layer in spec.layers(kind):
            page = pool.pages(kind, layer)[3]
            for at in range(len(page)):
                page[at] ^= 1
                assert (page_checksums(pool, pages) == before).tolist() == [False, True, True]
                page[at] ^= 1
                seen += 1
    assert seen == spec.bytes_per_page


def test_the_checksum_is_that_of_zlib_over_the_layers_in_order() -> None:
    spec = make_spec()
    buffer = PrivateBuffer(spec.pool_bytes(2))
    buffer.tensor.copy_(torch.arange(buffer.nbytes) % 251)
    pool = KVPool(spec, 2, buffer)
    whole = b"".join(
        pool.pages(kind, layer)[2].numpy().tobytes()
        for kind in PAGE_KINDS
        for layer in spec.layers(kind)
    )
    assert page_checksums(pool, PhysicalPages(np.array([2]))).tolist() == [zlib.crc32(whole)]

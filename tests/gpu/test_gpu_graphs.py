"""Kernels captured in a CUDA graph work on whatever their memory holds at the replay."""

from __future__ import annotations

import pytest
import torch

from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import WritePlan

pytestmark = pytest.mark.gpu

PAGES, PAGE_SIZE = 33, 64
TOKENS = 300


def captured(operation: object) -> torch.cuda.CUDAGraph:
    """The operation in a graph; capturing fails on anything that makes the host wait."""
    assert callable(operation)
    operation()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operation()
    return graph


@pytest.mark.parametrize("name", ["bf16", "fp8_ds_mla"])
def test_a_captured_write_follows_the_plan_of_each_batch(gpu: torch.device, name: str) -> None:
    from cp_shared_kv.memory.gpu_writes import store_index, store_latent

    latent_pages = latent_format(name, kv_lora_rank=512, qk_rope_head_dim=64, page_size=PAGE_SIZE)
    index_pages = index_format("fp8_scaled", index_head_dim=128, page_size=PAGE_SIZE)
    pools = [
        torch.empty(PAGES, form.page_bytes, dtype=torch.uint8, device=gpu)
        for form in (latent_pages, index_pages)
    ]
    values = torch.empty(TOKENS, 704, dtype=torch.bfloat16, device=gpu).zero_()
    latent, k_pe, index_k = values.split((512, 64, 128), dim=1)
    zeros = torch.zeros(TOKENS, dtype=torch.int64)
    plan = WritePlan(zeros, zeros).to(gpu)

    def write() -> None:
        store_latent(latent_pages, pools[0], latent, k_pe, plan)
        store_index(index_pages, pools[1], index_k, plan)

    graph = captured(write)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        values.copy_(torch.randn(values.shape, generator=generator))
        rows = torch.nonzero(torch.rand(TOKENS, generator=generator) < 0.5).flatten()
        places = torch.randperm((PAGES - 1) * PAGE_SIZE, generator=generator)[: len(rows)]
        of_batch = WritePlan(rows, places + PAGE_SIZE).padded(TOKENS).to(gpu)
        plan.rows.copy_(of_batch.rows)
        plan.physical_locs.copy_(of_batch.physical_locs)
        expected = [torch.full_like(pool, seed) for pool in pools]
        for pool in pools:
            pool.fill_(seed)
        graph.replay()
        at, chosen = (places + PAGE_SIZE).to(gpu), rows.to(gpu)
        latent_pages.scatter_rows(expected[0], at, latent_pages.encode(latent, k_pe)[chosen])
        index_pages.scatter_rows(expected[1], at, index_pages.encode(index_k)[chosen])
        assert torch.equal(pools[0], expected[0])
        assert torch.equal(pools[1], expected[1])


def test_a_captured_selection_follows_each_top_k(gpu: torch.device) -> None:
    from cp_shared_kv.kernels.pull_rows import pull_rows
    from cp_shared_kv.kernels.select_rows import SelectedRows

    slots, row_bytes = PAGES * PAGE_SIZE, 656
    pages = torch.randint(0, 256, (PAGES, PAGE_SIZE * row_bytes), dtype=torch.uint8, device=gpu)
    order = torch.randperm(PAGES, device=gpu)
    sources = order * (pages.shape[1] // 8)
    topk = torch.zeros(40, 64, dtype=torch.int32, device=gpu)
    places = torch.empty_like(topk)
    selected = SelectedRows.make(slots, topk.numel(), gpu)
    out = torch.empty(len(selected.rows), row_bytes, dtype=torch.uint8, device=gpu)

    def select() -> None:
        selected.select(topk, places, 0)
        pull_rows(pages, sources, PAGE_SIZE, selected.rows, selected.count, 2, out)

    graph = captured(select)
    whole = pages[order].view(-1, row_bytes)
    for spread in (slots, 100, 1):
        topk.random_(-1, spread)
        out.fill_(0xFF)
        graph.replay()
        named = topk >= 0
        assert torch.equal(out[places[named].long()], whole[topk[named].long()])
        assert int(selected.count) == len(topk[named].unique())


def test_addresses_past_two_to_the_31_are_reached(gpu: torch.device) -> None:
    from cp_shared_kv.kernels.pull_pages import pull_pages
    from cp_shared_kv.kernels.pull_rows import pull_rows
    from cp_shared_kv.kernels.push_pages import push_pages
    from cp_shared_kv.memory.gpu_writes import store_index, store_latent

    form = latent_format("fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=64, page_size=PAGE_SIZE)
    index = index_format("fp8_scaled", index_head_dim=128, page_size=PAGE_SIZE)
    # Past 2^31 words of 8 bytes.
    count = (1 << 34) // form.page_bytes + 100
    pages = torch.empty(count, form.page_bytes, dtype=torch.uint8, device=gpu)
    far = torch.tensor([count - 1, count - 2, 3], device=gpu)
    pages[far] = torch.randint(0, 256, (3, form.page_bytes), dtype=torch.uint8, device=gpu)
    sources = far * (form.page_bytes // 8)
    scratch = torch.empty(3, form.page_bytes, dtype=torch.uint8, device=gpu)
    pull_pages(pages, sources, torch.arange(3, dtype=torch.int32, device=gpu), scratch)
    assert torch.equal(scratch, pages[far])
    push_pages(pages, far, scratch.zero_(), 0, torch.zeros(1, dtype=torch.int64, device=gpu), 0)
    assert torch.equal(scratch, pages[far])
    rows = torch.tensor([5, 70, 190], dtype=torch.int32, device=gpu)
    out = torch.empty(3, form.row_bytes, dtype=torch.uint8, device=gpu)
    three = torch.tensor([3], dtype=torch.int32, device=gpu)
    pull_rows(pages, sources, PAGE_SIZE, rows, three, 2, out)
    assert torch.equal(out, scratch.view(-1, form.row_bytes)[rows.long()])
    values = torch.randn(3, 704, dtype=torch.bfloat16, device=gpu)
    latent, k_pe, index_k = values.split((512, 64, 128), dim=1)
    places = far[:2] * PAGE_SIZE + 7
    plan = WritePlan(torch.tensor([2, 0], device=gpu), places)
    store_latent(form, pages, latent, k_pe, plan)
    assert torch.equal(form.gather_rows(pages, places), form.encode(latent, k_pe)[plan.rows])
    index_view = pages.view(-1)[: pages.numel() // index.page_bytes * index.page_bytes]
    index_view = index_view.view(-1, index.page_bytes)
    places = (len(index_view) - far[:2] % 7 - 1) * PAGE_SIZE + 9
    plan = WritePlan(torch.tensor([1, 2], device=gpu), places.unique())
    store_index(index, index_view, index_k, plan)
    got = index.gather_rows(index_view, plan.physical_locs)
    assert torch.equal(got, index.encode(index_k)[plan.rows])

"""Selected rows are found, numbered and fetched, as torch.unique and the full prefix have them."""

from __future__ import annotations

import pytest
import torch

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.reads.page_sources import PageSources
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan

POISON = 0xA5
PAGE_SIZE = 16


def choose(tokens: int, k: int, slots: int, how: str, seed: int) -> torch.Tensor:
    """i32[tokens, k]: slots, each once a token, and -1 where a token has fewer."""
    generator = torch.Generator().manual_seed(seed)
    topk = torch.full((tokens, k), -1, dtype=torch.int32)
    for token in range(tokens):
        first = 0 if how == "uniform" else int(torch.randint(slots, (1,), generator=generator))
        near = slots if how == "uniform" else min(slots - first, 2 * k)
        chosen = torch.randperm(near, generator=generator)[: k - token % 3] + first
        topk[token, : len(chosen)] = chosen.int()
    return topk


@pytest.mark.parametrize("how", ["uniform", "clustered"])
@pytest.mark.parametrize(
    ("tokens", "k", "slots"),
    [(1, 1, 1), (3, 40, 31), (5, 16, 4096), (2, 600, 4097), (7, 64, 3 * 4096), (4, 300, 40_000)],
)
def test_every_selected_row_once_and_in_order(
    device: torch.device, tokens: int, k: int, slots: int, how: str
) -> None:
    from cp_shared_kv.kernels.select_rows import SelectedRows

    selected = SelectedRows.make(slots, tokens * k, device)
    for seed in range(3):  # on the same memory, so that nothing of one may show in the next
        # The last 5 lie in the chunk.
        topk = choose(tokens, k, slots + 5, how, seed)
        compact = torch.full_like(topk, 12345).to(device)
        selected.rows.fill_(-7)
        selected.select(topk.to(device), compact, first_row=100)
        expected, inverse = topk.unique(return_inverse=True)
        fetched = expected[(expected >= 0) & (expected < slots)]
        assert selected.count.tolist() == [len(fetched)]
        assert selected.rows[: len(fetched)].tolist() == fetched.tolist()
        assert (selected.rows[len(fetched) :] == -7).all()
        numbers = torch.where(
            expected < 0,
            -1,
            torch.where(
                expected < slots,
                100 + torch.arange(len(expected)) - int((expected < 0).sum()),
                expected - slots,
            ),
        )
        assert compact.tolist() == numbers[inverse].tolist()


def test_the_highest_bit_of_a_word_counts(device: torch.device) -> None:
    from cp_shared_kv.kernels.select_rows import SelectedRows

    selected = SelectedRows.make(64, 64, device)
    topk = torch.tensor([[31, 63, 0, 32, 31, 63]], dtype=torch.int32, device=device)
    compact = torch.empty_like(topk)
    selected.select(topk, compact, first_row=0)
    assert selected.rows[:4].tolist() == [0, 31, 32, 63]
    assert compact.tolist() == [[1, 3, 0, 2, 1, 3]]


def test_no_prefix_and_padding_alone_select_nothing(device: torch.device) -> None:
    from cp_shared_kv.kernels.select_rows import SelectedRows

    selected = SelectedRows.make(0, 4, device)
    topk = torch.tensor([[-1, 0, 2, -1]], dtype=torch.int32, device=device)
    compact = torch.empty_like(topk)
    selected.select(topk, compact, first_row=9)
    assert selected.count.tolist() == [0]
    assert compact.tolist() == [[-1, 0, 2, -1]]  # all of them in the chunk


@pytest.mark.parametrize("row_bytes", [1152, 656, 48])
@pytest.mark.parametrize(("cp_size", "prefix_pages"), [(2, 20), (4, 33), (3, 1), (4, 2)])
def test_only_the_selected_rows_are_fetched(
    device: torch.device, cp_size: int, prefix_pages: int, row_bytes: int
) -> None:
    from cp_shared_kv.kernels.pull_rows import pull_rows
    from cp_shared_kv.kernels.select_rows import SelectedRows

    physical_pages = 13
    layout = CpSharedKVLayout(PAGE_SIZE, cp_size, 0, physical_pages=physical_pages)
    pages = torch.randperm(cp_size * physical_pages, generator=torch.Generator().manual_seed(1)) + 1
    span = BatchSpan(LogicalPages(pages.numpy()), prefix_pages * PAGE_SIZE, 1)
    plan = ReadPlan.build(layout, [span])
    pools = [
        torch.randint(
            0, 256, (physical_pages + 1, row_bytes * PAGE_SIZE), dtype=torch.uint8, device=device
        )
        for _ in range(cp_size)
    ]
    distances = [pool.data_ptr() - pools[0].data_ptr() for pool in pools]
    sources = PageSources.build(plan, 0, distances, row_bytes * PAGE_SIZE, device)
    whole = torch.cat(
        [
            pool[plan.physical_pages[plan.owner_range(owner)].to(device)]
            for owner, pool in enumerate(pools)
        ]
    ).view(-1, row_bytes)
    for tokens, k in ((1, 1), (6, 40)):
        topk = choose(tokens, k, prefix_pages * PAGE_SIZE, "uniform", seed=tokens).to(device)
        selected = SelectedRows.make(prefix_pages * PAGE_SIZE, topk.numel(), device)
        compact = torch.empty_like(topk)
        selected.select(topk, compact, first_row=0)
        out = torch.full((len(selected.rows) + 1, row_bytes), POISON, dtype=torch.uint8).to(device)
        pull_rows(
            pools[0],
            sources.sources,
            PAGE_SIZE,
            selected.rows,
            selected.count,
            cp_size,
            out,
        )
        named = topk >= 0
        assert torch.equal(out[compact[named]], whole[topk[named]])
        assert (out[int(selected.count) :] == POISON).all()

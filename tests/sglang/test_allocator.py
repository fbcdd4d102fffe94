"""Our allocator beside SGLang's: the same promises, call for call, whatever pages it picks."""

from __future__ import annotations

import random

import pytest
import torch

from cp_shared_kv.errors import ConfigError

PAGE = 64
PAGES = 32


def _ours(cp_size: int, pages: int = PAGES, *, need_sort: bool = True):
    from cp_shared_kv.integrations.sglang.allocator import CPSharedPagedTokenToKVPoolAllocator

    return CPSharedPagedTokenToKVPoolAllocator(
        logical_size=pages * PAGE,
        physical_size=pages * PAGE // cp_size,
        page_size=PAGE,
        dtype=torch.bfloat16,
        device="cpu",
        kvcache=None,
        need_sort=need_sort,
        cp_size=cp_size,
        cp_rank=0,
    )


def _stock(pages: int = PAGES, *, need_sort: bool = True):
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

    return PagedTokenToKVPoolAllocator(pages * PAGE, PAGE, torch.bfloat16, "cpu", None, need_sort)


def _stock_extend(stock, prefix_lens: list[int], seq_lens: list[int], last_locs: list[int]):
    """None where it must come to that: its kernel would read past its list first, and crash."""
    pairs = zip(prefix_lens, seq_lens, strict=True)
    pages = sum(-(-seq // PAGE) - -(-prefix // PAGE) for prefix, seq in pairs)
    if pages * PAGE > _drawable(stock):
        return None
    return _extend(stock, prefix_lens, seq_lens, last_locs)


def _drawable(stock) -> int:
    return stock.available_size() if stock.need_sort else len(stock.free_pages) * PAGE


def _extend(allocator, prefix_lens: list[int], seq_lens: list[int], last_locs: list[int]):
    prefix, seq, last = (torch.tensor(v) for v in (prefix_lens, seq_lens, last_locs))
    tokens = sum(seq_lens) - sum(prefix_lens)
    return allocator.alloc_extend(prefix, prefix, seq, seq, last, tokens)


def test_the_plans_allocator_test() -> None:
    allocator = _ours(4, pages=8, need_sort=False)

    assert allocator.available_size() == 64 * 8
    locs = allocator.alloc(64 * 2)
    assert locs.numel() == 64 * 2
    assert allocator.available_size() == 64 * 6
    allocator.free(locs)
    assert allocator.available_size() == 64 * 8


def test_sizes_that_do_not_go_together_are_refused() -> None:
    from cp_shared_kv.integrations.sglang.allocator import CPSharedPagedTokenToKVPoolAllocator

    with pytest.raises(ConfigError, match="logical and physical size"):
        CPSharedPagedTokenToKVPoolAllocator(
            512, 256, PAGE, torch.bfloat16, "cpu", None, True, cp_size=4, cp_rank=0
        )


def test_a_prompt_and_its_chunks_take_owners_in_turn() -> None:
    allocator = _ours(4)
    first = _extend(allocator, [0], [5 * PAGE + 10], [-1])
    other = _extend(allocator, [0], [3 * PAGE], [-1])
    second = _extend(allocator, [len(first)], [9 * PAGE], [int(first[-1])])

    pages = torch.unique_consecutive(torch.cat((first, second)) // PAGE)
    owners = ((pages - 1) % 4).tolist()
    assert owners == [(owners[0] + i) % 4 for i in range(9)]
    assert len(torch.unique(torch.cat((first, other, second)))) == 12 * PAGE


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("need_sort", [False, True])
def test_the_same_promises_as_stock_call_for_call(cp_size: int, need_sort: bool) -> None:
    """The same sequence of calls on both: equal sizes, equal shapes, equal places in pages."""
    rng = random.Random(cp_size * 2 + need_sort)
    ours, stock = _ours(cp_size, need_sort=need_sort), _stock(need_sort=need_sort)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for _ in range(300):
        choice = rng.random()
        if choice < 0.35 and held:
            index = rng.randrange(len(held))
            before_ours, before_stock = held[index]
            length, more = len(before_ours), rng.randrange(1, 4 * PAGE)
            got = _extend(ours, [length], [length + more], [int(before_ours[-1])])
            expected = _stock_extend(stock, [length], [length + more], [int(before_stock[-1])])
            if _alike(got, expected):
                held[index] = torch.cat((before_ours, got)), torch.cat((before_stock, expected))
        elif choice < 0.5 and held:
            lengths = [len(a) + 1 for a, _ in held]
            tensors = torch.tensor(lengths)
            got = ours.alloc_decode(tensors, tensors, torch.stack([a[-1] for a, _ in held]))
            expected = None
            if sum(length % PAGE == 1 for length in lengths) * PAGE <= _drawable(stock):
                last_locs = torch.stack([b[-1] for _, b in held])
                expected = stock.alloc_decode(tensors, tensors, last_locs)
            if _alike(got, expected):
                held = [
                    (torch.cat((a, got[i : i + 1])), torch.cat((b, expected[i : i + 1])))
                    for i, (a, b) in enumerate(held)
                ]
        elif choice < 0.8:
            lengths = [rng.randrange(1, 5 * PAGE) for _ in range(rng.randrange(1, 4))]
            got = _extend(ours, [0] * len(lengths), lengths, [-1] * len(lengths))
            expected = _stock_extend(stock, [0] * len(lengths), lengths, [-1] * len(lengths))
            if _alike(got, expected):
                held += zip(got.split(lengths), expected.split(lengths), strict=True)
        elif held:
            mine, theirs = held.pop(rng.randrange(len(held)))
            ours.free(mine)
            stock.free(theirs)
        assert ours.available_size() == stock.available_size()
        _check_books(ours, [a for a, _ in held])
    for mine, _ in held:
        ours.free(mine)
    assert ours.available_size() == PAGES * PAGE


def _alike(got: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """Both refused, or both gave as many locs at the same offsets in pages."""
    assert (got is None) == (expected is None)
    if got is None or expected is None:
        return False
    assert got.dtype == expected.dtype
    assert torch.equal(got % PAGE, expected % PAGE)
    return True


def _check_books(allocator, held: list[torch.Tensor]) -> None:
    """Every page is free or held, once, and none of padding's is either."""
    of_requests = [torch.unique_consecutive(locs // PAGE) for locs in held]
    pages = torch.cat([allocator.free_pages, allocator.release_pages, *of_requests])
    assert sorted(pages.tolist()) == list(range(1, PAGES + 1))


def test_groups_of_frees_and_saved_states_work_as_in_stock() -> None:
    allocator = _ours(4)
    a, b = allocator.alloc(2 * PAGE), allocator.alloc(3 * PAGE)
    state = allocator.backup_state()
    allocator.free_group_begin()
    allocator.free(a)
    allocator.free(b)
    assert allocator.available_size() == (PAGES - 5) * PAGE
    allocator.free_group_end()
    assert allocator.available_size() == PAGES * PAGE
    allocator.restore_state(state)
    assert allocator.available_size() == (PAGES - 5) * PAGE


def test_the_whole_pool_can_be_drawn_whatever_the_owners() -> None:
    allocator = _ours(4)
    locs = allocator.alloc(PAGES * PAGE)
    only_owner_2 = [p for p in range(1, PAGES + 1) if (p - 1) % 4 == 2]
    allocator.free(locs[torch.isin(locs // PAGE, torch.tensor(only_owner_2))])

    again = _extend(allocator, [0], [len(only_owner_2) * PAGE], [-1])

    assert sorted(torch.unique(again // PAGE).tolist()) == only_owner_2
    assert allocator.available_size() == 0
    assert allocator.alloc(PAGE) is None

"""SGLang's radix tree and request table over logical locs: a pool N times as large, all of it."""

from __future__ import annotations

import pytest
import torch

PAGE, PHYSICAL_PAGES, CP_SIZE = 64, 6, 4


@pytest.fixture
def parts():
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache

    from cp_shared_kv.integrations.sglang.allocator import CPSharedPagedTokenToKVPoolAllocator

    allocator = CPSharedPagedTokenToKVPoolAllocator(
        *(CP_SIZE * PHYSICAL_PAGES * PAGE, PHYSICAL_PAGES * PAGE, PAGE),
        *(torch.bfloat16, "cpu", None, True, CP_SIZE, 0),
    )
    requests = ReqToTokenPool(4, 4096, "cpu", False)
    return allocator, RadixCache(CacheInitParams(False, requests, allocator, PAGE))


def _prefill(allocator, cache, tokens: list[int]) -> tuple[int, torch.Tensor]:
    """What a scheduler does for a prompt: match, draw the rest, insert. Prefix length and locs."""
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    prefix = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens))).device_indices
    lengths = torch.tensor([len(prefix)]), torch.tensor([len(tokens)])
    last = prefix[-1:] if len(prefix) else torch.tensor([-1])
    new = allocator.alloc_extend(
        lengths[0], lengths[0], lengths[1], lengths[1], last, len(tokens) - len(prefix)
    )
    assert new is not None
    locs = torch.cat((prefix, new))
    cache.insert(InsertParams(key=RadixKey(tokens), value=locs))
    return len(prefix), locs


def test_a_prompt_larger_than_one_rank_is_cached_and_found_again(parts) -> None:
    allocator, cache = parts
    tokens = list(range(10 * PAGE))  # one rank holds 6 pages

    _, locs = _prefill(allocator, cache, tokens)
    hit, again = _prefill(allocator, cache, [*tokens, *range(PAGE)])

    assert hit == 10 * PAGE
    assert torch.equal(again[: 10 * PAGE], locs)
    owners = ((torch.unique_consecutive(again // PAGE) - 1) % CP_SIZE).tolist()
    assert owners == [(owners[0] + i) % CP_SIZE for i in range(11)]


def test_the_whole_group_can_be_filled_evicted_and_filled_again(parts) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator, cache = parts
    total = CP_SIZE * PHYSICAL_PAGES
    for turn in range(3):
        seen: set[int] = set()
        for prompt in range(6):
            first_token = 10_000 * (1 + prompt + 10 * turn)
            _, locs = _prefill(allocator, cache, list(range(first_token, first_token + 4 * PAGE)))
            seen |= set((locs // PAGE).tolist())
        assert seen == set(range(1, total + 1))
        assert allocator.available_size() == 0
        cache.evict(EvictParams(num_tokens=total * PAGE))
        assert allocator.available_size() == total * PAGE

"""SGLang's own init_memory_pool with our hooks in it: what is charged, built and said."""

from __future__ import annotations

from pathlib import Path

import pytest

from cp_shared_kv.integrations.sglang.hooks import WORKER
from cp_shared_kv.testing.rank_pool import RankPool

pytestmark = pytest.mark.ranks
RANKS = str(Path(__file__).with_name("capacity_ranks.py"))
FREE_BYTES = 128 << 20
BYTES_PER_TOKEN = {"bfloat16": 3 * (1152 + 132), "fp8_e4m3": 3 * (656 + 132)}


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_the_pool_is_physical_and_the_scheduler_logical(rank_pool: RankPool, dtype: str) -> None:
    results = rank_pool.run(
        f"{RANKS}:build",
        size=4,
        timeout_seconds=280,
        dtype=dtype,
        flag=True,
        free_bytes=FREE_BYTES,
        limit=None,
    )

    assert all(result == results[0] for result in results)
    built = results[0]
    physical = built["rows"] - 64
    logical = 4 * physical
    assert built["pool"] == "CPSharedNSATokenToKVPool"
    assert built["allocator"] == "CPSharedPagedTokenToKVPoolAllocator"
    for told in ("told", "max_total_num_tokens", "allocator_size", "available", "pool_size"):
        assert built[told] == logical, told
    # All of the memory is used, to a page, and not a byte more.
    assert built["pool_bytes"] == (physical + 64) * BYTES_PER_TOKEN[dtype]
    used = built["pool_bytes"] + built["scratch_bytes"]
    assert used <= FREE_BYTES < used + 64 * BYTES_PER_TOKEN[dtype]
    enabled, scheduler = (line for line in built["lines"] if "logical_tokens" in line)
    assert enabled == (
        f"CP shared KV enabled. physical_tokens_per_rank={physical}, logical_tokens={logical}, "
        "cp_size=4, shard_policy=page_interleaved"
    )
    assert scheduler == (
        f"CP shared KV scheduler capacity: logical_tokens={logical}, "
        f"physical_tokens_per_rank={physical}, cp_size=4"
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_a_draft_is_paid_for_and_shares_what_the_model_has(rank_pool: RankPool, dtype: str) -> None:
    built, *_ = rank_pool.run(
        f"{RANKS}:build",
        size=2,
        timeout_seconds=280,
        dtype=dtype,
        flag=True,
        free_bytes=FREE_BYTES,
        limit=None,
        drafts=True,
    )

    draft = built["draft"]
    assert draft["pool"] == "CPSharedNSATokenToKVPool"
    assert draft["pool_size"] == built["pool_size"] == 2 * (built["rows"] - 64)
    assert draft["rows"] == built["rows"]
    assert draft["same scratch"]
    assert draft["same allocator"]
    page_bytes = 64 * BYTES_PER_TOKEN[dtype] * 4 // 3
    used = built["pool_bytes"] + draft["pool_bytes"] + built["scratch_bytes"]
    assert used <= FREE_BYTES < used + page_bytes
    # The two startup lines are the model's, once.
    assert sum("logical_tokens" in line for line in built["lines"]) == 2


def test_max_total_tokens_is_a_ranks(rank_pool: RankPool) -> None:
    settings = {"dtype": "bfloat16", "free_bytes": FREE_BYTES, "limit": 1000}
    shared, *_ = rank_pool.run(f"{RANKS}:build", size=2, timeout_seconds=280, flag=True, **settings)
    stock, *_ = rank_pool.run(f"{RANKS}:build", size=2, timeout_seconds=280, flag=False, **settings)

    assert (shared["rows"], stock["rows"]) == (960 + 64, 960 + 64)
    assert (shared["told"], stock["told"]) == (2 * 960, 960)
    assert shared["requests"] == stock["requests"]


def test_without_the_flag_sglang_builds_its_own(rank_pool: RankPool) -> None:
    built, *_ = rank_pool.run(
        f"{RANKS}:build",
        size=2,
        timeout_seconds=280,
        dtype="bfloat16",
        flag=False,
        free_bytes=FREE_BYTES,
        limit=None,
    )

    assert (built["pool"], built["allocator"]) == (
        "NSATokenToKVPool",
        "PagedTokenToKVPoolAllocator",
    )
    assert built["lines"] == []


def test_nothing_is_built_when_a_hook_is_missing(rank_pool: RankPool) -> None:
    said = rank_pool.run(f"{RANKS}:build_with_a_hook_missing", size=1, timeout_seconds=280)

    assert f"hook not applied: {WORKER[7].target}" in said[0]

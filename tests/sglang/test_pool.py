"""Writes and reads of a shared pool against SGLang's replicated one, bit for bit, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cp_shared_kv.testing.rank_pool import RankPool

pytestmark = pytest.mark.ranks
RANKS = str(Path(__file__).with_name("pool_ranks.py"))

ONE_BY_ONE: list[list[list[Any]]] = [
    [[1, 0, 100, None]],  # ends inside a page
    [[1, 100, 200, None]],  # goes on in it
    [[2, 128, 70, 1]],  # a prefix hit
    [[3, 0, 3, None]],  # fewer tokens than ranks, fewer pages too
    [[3, 3, 1, None]],  # one token, in a page that is begun
    [[2, 198, 130, None]],
]
TOGETHER: list[list[list[Any]]] = [
    [[1, 0, 100, None], [2, 0, 64, None]],
    [[1, 100, 92, None], [3, 64, 65, 2], [2, 64, 3, None]],  # two requests share a prefix
    [[4, 128, 1, 1], [2, 67, 61, None]],
]


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("split", "plan"),
    [
        ("in-seq-split", ONE_BY_ONE),
        ("round-robin-split", ONE_BY_ONE),
        ("round-robin-split", TOGETHER),
    ],
    ids=["in-seq", "round-robin", "round-robin-together"],
)
def test_as_stock_bit_for_bit(
    rank_pool: RankPool, dtype: str, size: int, split: str, plan: list[list[list[Any]]]
) -> None:
    pages_read = rank_pool.run(
        f"{RANKS}:run",
        size=size,
        timeout_seconds=280,
        dtype=dtype,
        split=split,
        plan=plan,
        kernels="torch",
        drafts=split == "in-seq-split",
    )

    assert len(set(pages_read)) == 1
    assert pages_read[0] > 0, "no prefix was read: the test compared nothing"


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_sglangs_own_kernels_by_our_tables(rank_pool: RankPool, dtype: str) -> None:
    plan = [[[1, 0, 65, None]], [[1, 65, 2, None]]]
    settings = {"dtype": dtype, "split": "in-seq-split", "plan": plan, "kernels": "interpreted"}

    pages_read = rank_pool.run(
        f"{RANKS}:run", size=2, timeout_seconds=280, drafts=False, **settings
    )

    assert all(pages > 0 for pages in pages_read)


def test_a_loc_never_reaches_memory_without_a_plan(rank_pool: RankPool) -> None:
    said = rank_pool.run(f"{RANKS}:refused_outside_a_batch", size=2, timeout_seconds=120)

    assert said == [["InvariantError"] * 5] * 2

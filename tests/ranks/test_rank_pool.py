"""The pool of rank processes itself: results, failures and hangs are all reported by rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from cp_shared_kv.testing.rank_pool import RankPool, RankPoolError
from cp_shared_kv.testing.rank_process import RankContext

pytestmark = pytest.mark.ranks


def rank_and_sum(context: RankContext, addend: int) -> list[int]:
    print("printing must not disturb the replies")
    gathered = torch.empty(context.size, 1, dtype=torch.uint8)
    context.group.all_gather_bytes(
        torch.tensor([context.rank + addend], dtype=torch.uint8), gathered
    )
    return [context.rank, int(gathered.sum())]


def raise_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        raise ValueError("only here")
    context.group.barrier()


def hang_on_rank_0(context: RankContext) -> None:
    if context.rank == 0:
        wait_for_ever()


def wait_for_ever() -> None:
    while True:
        time.sleep(1)


def die_on_rank_1(context: RankContext) -> None:
    if context.rank == 1:
        os._exit(7)
    context.group.barrier()


def die_soon(context: RankContext) -> None:
    threading.Timer(0.1, os._exit, [9]).start()


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_first_ranks_run_a_function_of_this_file_in_their_own_group(
    rank_pool: RankPool, size: int
) -> None:
    results = rank_pool.run(f"{__file__}:rank_and_sum", size=size, addend=10)
    assert results == [[rank, sum(range(10, 10 + size))] for rank in range(size)]


def test_failure_brings_that_ranks_traceback_and_the_pool_works_again(pair: RankPool) -> None:
    with pytest.raises(
        RankPoolError, match=r"rank 1 Traceback(.|\n)*raise_on_rank_1(.|\n)*only here"
    ):
        pair.run(f"{__file__}:raise_on_rank_1", timeout_seconds=60)
    assert pair.run(f"{__file__}:rank_and_sum", addend=0) == [[0, 1], [1, 1]]


def test_hang_is_ended_at_the_limit_and_says_which_rank_stood_where(pair: RankPool) -> None:
    with pytest.raises(RankPoolError) as caught:
        pair.run(f"{__file__}:hang_on_rank_0", timeout_seconds=1)
    assert "rank 0 has not ended within 1 seconds" in str(caught.value)
    assert "wait_for_ever" in str(caught.value)
    assert "rank 1" not in str(caught.value)


def test_death_of_a_rank_is_reported_with_its_exit_code(pair: RankPool) -> None:
    with pytest.raises(RankPoolError, match="rank 1 died with exit code 7"):
        pair.run(f"{__file__}:die_on_rank_1", timeout_seconds=60)


def test_ranks_that_died_since_the_last_call_are_reported(pair: RankPool) -> None:
    pair.run(f"{__file__}:die_soon", size=1)
    time.sleep(0.5)
    with pytest.raises(RankPoolError, match="rank 0 died with exit code 9"):
        pair.run(f"{__file__}:rank_and_sum", addend=0)


def test_more_ranks_than_the_pool_has_are_refused(pair: RankPool) -> None:
    with pytest.raises(ValueError, match="3 ranks wanted of a pool of 2"):
        pair.run(f"{__file__}:rank_and_sum", size=3, addend=0)

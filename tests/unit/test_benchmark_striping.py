"""The count of descriptors: what is known without counting."""

from __future__ import annotations

import pytest
from benchmarks.micro.striping import DEMO_PROMPT_TOKENS, POOLS, count


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_in_fresh_pools_a_rank_needs_one_descriptor_a_chunk_and_without_striping_one_a_page(
    cp_size: int,
) -> None:
    at_once = count(DEMO_PROMPT_TOKENS, cp_size, "fresh", None)
    assert set(at_once.in_order) == {at_once.pages} == {178}
    assert set(at_once.striped) == {cp_size}
    chunks = count(DEMO_PROMPT_TOKENS, cp_size, "fresh", 2048)
    assert set(chunks.striped) == {cp_size * 6}


def test_the_more_scattered_the_free_pages_the_less_there_is_to_merge() -> None:
    medians = [count(20_000, 4, pools, None).summary()["median_striped"] for pools in POOLS]
    assert medians == sorted(medians)
    assert len(set(medians)) == 3


def test_nothing_is_random_but_by_the_seed() -> None:
    first, second = (count(20_000, 2, "half of the pages freed", 2048) for _ in range(2))
    assert first == second
    assert len(set(first.striped)) > 1

"""Which tokens a rank computes: worked examples of both splits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.layout import split_tokens


def as_lists(shares: list[np.ndarray]) -> list[list[int]]:
    return [share.tolist() for share in shares]


def test_in_seq_split_pairs_an_early_segment_with_a_late_one() -> None:
    # Ten tokens in four segments: 3 + 3 + 2 + 2.
    shares = split_tokens("in-seq-split", [10], cp_size=2)
    assert as_lists(shares) == [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]


def test_in_seq_split_cuts_each_request_of_a_batch() -> None:
    shares = split_tokens("in-seq-split", [4, 0, 6], cp_size=2)
    assert as_lists(shares) == [[0, 3, 4, 5, 9], [1, 2, 6, 7, 8]]


def test_round_robin_split_deals_the_whole_batch_in_turn() -> None:
    shares = split_tokens("round-robin-split", [2, 0, 5], cp_size=3)
    assert as_lists(shares) == [[0, 3, 6], [1, 4], [2, 5]]


@pytest.mark.parametrize("mode", ["in-seq-split", "round-robin-split"])
def test_a_chunk_shorter_than_the_group_leaves_ranks_without_tokens(mode: Any) -> None:
    assert as_lists(split_tokens(mode, [2], cp_size=4)) == [[0], [1], [], []]


@pytest.mark.parametrize("mode", ["in-seq-split", "round-robin-split"])
@pytest.mark.parametrize("counts", [[], [0], [0, 0]])
def test_no_tokens_give_every_rank_an_empty_share(mode: Any, counts: list[int]) -> None:
    shares = split_tokens(mode, counts, cp_size=3)
    assert as_lists(shares) == [[], [], []]
    assert all(share.dtype == np.int64 for share in shares)


@pytest.mark.parametrize("mode", ["in-seq-split", "round-robin-split"])
def test_one_rank_computes_everything_in_order(mode: Any) -> None:
    assert as_lists(split_tokens(mode, [3, 2], cp_size=1)) == [[0, 1, 2, 3, 4]]


def test_in_seq_pairs_cost_about_the_same_attention() -> None:
    # A token at position p attends to p + 1 tokens.
    costs = [int((share + 1).sum()) for share in split_tokens("in-seq-split", [4096], cp_size=8)]
    assert max(costs) == min(costs)


@pytest.mark.parametrize(
    ("mode", "counts", "cp_size", "message"),
    [
        ("zigzag", [1], 2, "unknown sequence split: 'zigzag'; allowed: in-seq-split, round-robin"),
        ("in-seq-split", [3, -1], 2, r"new_token_counts\[1\] is too small: -1"),
        ("round-robin-split", [2.0], 2, r"new_token_counts\[0\] is not a whole number"),
        ("in-seq-split", [1], 0, "cp_size is too small: 0"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    mode: Any, counts: Any, cp_size: int, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        split_tokens(mode, counts, cp_size)

"""Greedy sampling gives the same token on every machine."""

from __future__ import annotations

import pytest
import torch

from cp_shared_kv.engine.sampling.greedy import sample_greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    logits = torch.tensor(
        [[1.0, 5.0, 5.0, 5.0], [7.0, 2.0, 3.0, 7.0], [-4.0, -9.0, -4.0, -4.0], [0.0] * 4],
        dtype=dtype,
    )
    assert sample_greedy(logits) == [1, 0, 0, 0]


def test_a_tie_in_a_large_vocabulary_goes_to_the_lowest_id() -> None:
    logits = torch.zeros(2, 50_000)
    logits[0, [49_999, 31_234, 40_000]] = 1.0
    logits[1] = 3.0
    assert sample_greedy(logits) == [31_234, 0]


def test_the_largest_logit_wins_by_any_margin() -> None:
    largest = torch.tensor(1.0)
    logits = torch.full((1, 8), 1.0).nextafter(torch.tensor(0.0))
    logits[0, 6] = largest
    assert sample_greedy(logits) == [6]


def test_minus_infinity_masks_a_token() -> None:
    assert sample_greedy(torch.tensor([[-torch.inf, -1e30, -torch.inf]])) == [1]


def test_no_rows_give_no_tokens() -> None:
    assert sample_greedy(torch.empty(0, 16)) == []

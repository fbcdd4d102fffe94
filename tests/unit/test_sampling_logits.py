"""Every change of the logits and every filter, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cp_shared_kv.engine.sampling.filters import keep_min_p, keep_top_k, keep_top_p, scale
from cp_shared_kv.engine.sampling.logit_edits import edit_logits
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.transfer.sampling_params import SamplingParams

NO = -math.inf
EOS = 1


def edited(
    logits: list[float], *, prompt: Sequence[int] = (), output: Sequence[int] = (), **p: Any
):
    return batch_edited([(logits, prompt, output, p)])[0]


def batch_edited(
    rows: list[tuple[list[float], Sequence[int], Sequence[int], dict[str, Any]]],
) -> list[list[float]]:
    scores = torch.tensor([logits for logits, *_ in rows])
    requests: list[SamplingState] = []
    for logits, prompt, output, params in rows:
        request = SamplingState(
            SamplingParams(**params),
            vocab_size=len(logits),
            eos_token_ids=(EOS,),
            prompt_token_ids=np.array(prompt, dtype=np.int64),
        )
        for token in output:
            request.append(token)
        requests.append(request)
    edit_logits(scores, requests)
    return scores.tolist()


def log(*probabilities: float) -> torch.Tensor:
    """One row of scores with these probabilities, as `scale` leaves them."""
    scores = torch.tensor([probabilities]).log()
    return scores - scores.max()


def kept(scores: torch.Tensor) -> list[list[int]]:
    return [torch.nonzero(row > NO).squeeze(-1).tolist() for row in scores]


# Edits ------------------------------------------------------------------------------------------


def test_repetition_divides_positive_logits_and_multiplies_negative_ones() -> None:
    # Token 0 is in the prompt, 2 and 3 in the output, 3 in both, 1 in neither.
    found = edited([3.0, 3.0, -2.0, 0.5], prompt=[0, 3], output=[2, 3, 3], repetition_penalty=2.0)
    assert found == [1.5, 3.0, -4.0, 0.25]


def test_repetition_below_one_favours_what_was_there() -> None:
    assert edited([3.0, 2.0, -2.0], output=[0, 2], repetition_penalty=0.5) == [6.0, 2.0, -1.0]


def test_presence_counts_a_token_of_the_output_once() -> None:
    found = edited([1.0, 1.0, 1.0], prompt=[2], output=[0, 0, 0], presence_penalty=0.5)
    assert found == [0.5, 1.0, 1.0]


def test_frequency_counts_a_token_of_the_output_each_time() -> None:
    found = edited([1.0, 1.0, 1.0], prompt=[2], output=[0, 0, 0, 1], frequency_penalty=0.5)
    assert found == [-0.5, 0.5, 1.0]


def test_penalties_come_in_vllms_order() -> None:
    # (4 + 2) / 2 - 3 * 0.25 - 0.5: bias before repetition, the others after.
    params = {
        "logit_bias": ((0, 2.0),),
        "repetition_penalty": 2.0,
        "frequency_penalty": 0.25,
        "presence_penalty": 0.5,
    }
    assert edited([4.0, 0.0], output=[0, 0, 0], **params) == [1.75, 0.0]


def test_bias_is_added_to_the_named_tokens() -> None:
    found = edited([1.0, 2.0, 3.0], logit_bias=((2, -100.0), (0, 1.5)))
    assert found == [2.5, 2.0, -97.0]


def test_endings_are_masked_until_the_least_tokens_are_there() -> None:
    params: dict[str, Any] = {"min_tokens": 2, "stop_token_ids": (3,)}
    logits = [1.0, 2.0, 3.0, 4.0]
    assert edited(logits, output=[0], **params) == [1.0, NO, 3.0, NO]
    assert edited(logits, output=[0, 0], **params) == logits
    assert edited(logits, ignore_eos=True, **params) == [1.0, 2.0, 3.0, NO]


def test_no_bias_lifts_a_masked_token() -> None:
    params: dict[str, Any] = {"min_tokens": 1, "logit_bias": ((EOS, 100.0),)}
    assert edited([0.0, 0.0], repetition_penalty=0.5, output=[], **params) == [0.0, NO]


def test_rows_of_a_batch_are_edited_as_if_they_were_alone() -> None:
    rows: list[tuple[list[float], Sequence[int], Sequence[int], dict[str, Any]]] = [
        ([1.0, 2.0, 3.0], [0, 1], [2, 2], {"repetition_penalty": 1.5, "frequency_penalty": 0.25}),
        ([1.0, 2.0, 3.0], [], [], {}),
        ([1.0, 2.0, 3.0], [], [0], {"presence_penalty": -0.5, "logit_bias": ((0, 0.125),)}),
        ([1.0, 2.0, 3.0], [], [], {"min_tokens": 1, "logit_bias": ((2, 1.0), (0, -1.0))}),
    ]
    together = batch_edited(rows)
    assert together == [batch_edited([row])[0] for row in rows]
    assert together[1] == [1.0, 2.0, 3.0]


# Temperature ------------------------------------------------------------------------------------


def test_the_temperature_divides_and_the_largest_becomes_0() -> None:
    scores = scale(torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 2.0]]), [0.5, 2.0])
    assert scores.tolist() == [[-4.0, 0.0, -2.0], [-1.0, 0.0, -0.5]]


def test_the_least_temperature_on_the_largest_logits_gives_no_nan() -> None:
    scores = scale(torch.tensor([[3e38, -3e38, 0.0], [NO, NO, NO]]), [1e-5, 1.0])
    assert scores.tolist() == [[0.0, NO, NO], [NO, NO, NO]]


# Filters ----------------------------------------------------------------------------------------


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    scores = log(0.5, 0.2, 0.06, 0.24).repeat(3, 1)
    assert kept(keep_min_p(scores, [0.3, 0.0, 1.0])) == [[0, 1, 3], [0, 1, 2, 3], [0]]


def test_top_k_keeps_the_k_likeliest_of_each_row() -> None:
    scores = torch.tensor([[1.0, 4.0, 2.0, 3.0]]).repeat(4, 1)
    assert kept(keep_top_k(scores, [2, 0, 1, 99])) == [[1, 3], [0, 1, 2, 3], [1], [0, 1, 2, 3]]


def test_top_k_keeps_all_that_equal_the_last() -> None:
    assert kept(keep_top_k(torch.tensor([[2.0, 1.0, 2.0, 3.0, 2.0]]), [2])) == [[0, 2, 3, 4]]


@pytest.mark.parametrize(
    ("top_p", "nucleus"),
    [
        (1e-9, [3]),
        (0.39, [3]),
        (0.41, [1, 3]),
        (0.69, [1, 3]),
        (0.71, [0, 1, 3]),
        (0.91, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, nucleus: list[int]) -> None:
    assert kept(keep_top_p(log(0.2, 0.3, 0.1, 0.4), [top_p])) == [nucleus]


@pytest.mark.parametrize(("top_p", "count"), [(0.49, 4), (0.5, 4), (0.51, 5)])
def test_top_p_takes_the_lowest_ids_among_equals(top_p: float, count: int) -> None:
    assert kept(keep_top_p(torch.zeros(1, 8), [top_p])) == [list(range(count))]


def test_top_p_is_a_matter_of_each_row() -> None:
    scores = log(0.2, 0.3, 0.1, 0.4).repeat(3, 1)
    assert kept(keep_top_p(scores, [0.5, 1.0, 0.1])) == [[1, 3], [0, 1, 2, 3], [3]]


def test_a_nucleus_larger_than_the_first_guess_is_found_whole() -> None:
    # Each token is a little more likely than the one before, so that no cut falls among equals.
    scores = torch.linspace(-0.5, 0.0, 5000).unsqueeze(0)
    probabilities = torch.softmax(scores[0].double(), -1)
    assert kept(keep_top_p(scores, [float(probabilities[1200:].sum()) - 1e-9])) == [
        list(range(1200, 5000))
    ]


def test_top_p_looks_at_what_the_filters_before_it_left() -> None:
    # Of 0.4, 0.3, 0.2, 0.1 the two likeliest remain, as 4/7 and 3/7.
    scores = keep_top_k(log(0.4, 0.3, 0.2, 0.1), [2])
    assert kept(keep_top_p(scores, [0.56])) == [[0]]
    assert kept(keep_top_p(scores, [0.58])) == [[0, 1]]


@pytest.mark.parametrize("keep", [keep_min_p, keep_top_k, keep_top_p])
def test_a_filter_leaves_the_scores_it_was_given(keep: Any) -> None:
    scores = log(0.2, 0.3, 0.5)
    before = scores.clone()
    keep(scores, [1 if keep is keep_top_k else 0.5])
    assert torch.equal(scores, before)

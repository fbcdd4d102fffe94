"""A batch in which every row asks for something else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cp_shared_kv.engine.sampling.sampler import SampledToken, sample, sample_where_numbers
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.transfer.sampling_params import SamplingParams

VOCAB = 32
EOS = 31


def state(output: tuple[int, ...] = (), **params: Any) -> SamplingState:
    made = SamplingState(SamplingParams(**params), vocab_size=VOCAB, eos_token_ids=(EOS,))
    for token in output:
        made.append(token)
    return made


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows))


def test_rows_without_a_request_and_neutral_ones_are_greedy() -> None:
    logits = random_logits(3)
    logits[1, [4, 9]] = 10.0
    expected = [SampledToken(int(row.argmax())) for row in logits]
    expected[1] = SampledToken(4)
    assert sample(logits, [None, None, state()]) == expected
    assert sample(logits[:0], []) == []


def test_temperature_0_takes_the_largest_of_the_edited_logits() -> None:
    logits = torch.zeros(1, VOCAB)
    assert sample(logits, [state(logit_bias=((7, 1.0), (3, 1.0)))])[0].token_id == 3
    assert sample(logits, [state((0, 1), presence_penalty=1.0)])[0].token_id == 2
    logits[0, EOS] = 5.0
    assert sample(logits, [state(min_tokens=1)])[0].token_id == 0
    assert sample(logits, [state((0,), min_tokens=1)])[0].token_id == EOS


def test_a_filter_that_leaves_one_token_gives_the_likeliest_at_any_temperature() -> None:
    logits = random_logits(3)
    requests = [
        state(temperature=5.0, top_k=1, seed=1),
        state(temperature=5.0, top_p=1e-6, seed=2),
        state(temperature=5.0, min_p=1.0, seed=3),
    ]
    assert [t.token_id for t in sample(logits, requests)] == logits.argmax(-1).tolist()


def test_every_row_is_chosen_as_if_it_were_alone_and_the_logits_stay() -> None:
    requests: list[SamplingState | None] = [
        state(temperature=1.0, seed=11),
        None,
        state(temperature=0.8, top_p=0.7, seed=11),
        state((3, 3, 4), repetition_penalty=1.3, temperature=1.5, top_k=5, seed=12, logprobs=3),
        state(logprobs=2),
        state((1,), logit_bias=((5, 4.0),), min_p=0.2, temperature=2.0, seed=-1),
        state((1, 2), frequency_penalty=0.5, min_tokens=9, logprobs=0),
    ]
    logits = random_logits(len(requests))
    before = logits.clone()
    together = sample(logits, requests)
    assert torch.equal(logits, before)
    alone = [sample(logits[i : i + 1], [r])[0] for i, r in enumerate(requests)]
    assert together == alone
    assert sample(logits.flip(0), requests[::-1]) == together[::-1]


def test_the_seed_and_the_position_decide() -> None:
    logits = torch.zeros(1, VOCAB)

    def token(seed: int, position: int) -> int:
        request = state((0,) * position, temperature=1.0, seed=seed)
        return sample(logits, [request])[0].token_id

    first = [token(7, position) for position in range(40)]
    assert [token(7, position) for position in range(40)] == first
    assert len(set(first)) > 15
    assert [token(8, position) for position in range(40)] != first


def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0] + [-math.inf] * (VOCAB - 4)])
    total = math.log(sum(math.exp(x) for x in (1.0, 3.0, 2.0, 0.0)))
    request = state(temperature=0.1, logit_bias=((3, 50.0),), top_k=1, seed=5, logprobs=2)
    token, told = sample(logits, [request])[0]
    assert token == 3  # by its bias, of which the log-probability knows nothing
    assert told is not None
    assert told.logprob == pytest.approx(0.0 - total, abs=1e-6)
    assert [t for t, _ in told.top] == [1, 2]
    assert [p for _, p in told.top] == pytest.approx([3.0 - total, 2.0 - total], abs=1e-6)


def test_equal_alternatives_are_told_by_their_ids_and_no_more_than_asked() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [20, 9]] = 1.0
    told = sample(logits, [state(logprobs=4)])[0].logprobs
    assert told is not None
    assert [t for t, _ in told.top] == [9, 20, 0, 1]
    assert told.logprob == told.top[0][1]


def test_no_alternatives_is_not_the_same_as_no_logprobs() -> None:
    logits = random_logits(2)
    asked, silent = sample(logits, [state(logprobs=0), state()])
    assert asked.logprobs is not None
    assert asked.logprobs.top == ()
    assert silent.logprobs is None


def test_logits_in_bf16_are_taken_too() -> None:
    logits = torch.zeros(2, VOCAB, dtype=torch.bfloat16)
    logits[:, 5] = 3.0
    found = sample(logits, [state(temperature=0.01, seed=1, logprobs=1), None])
    assert [t.token_id for t in found] == [5, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 17, VOCAB - 1])
def test_a_row_that_is_no_numbers_gives_no_token_and_changes_no_other(
    at: int, value: float, dtype: torch.dtype
) -> None:
    requests: list[SamplingState | None] = [
        None,
        state(temperature=1.0, seed=11, logprobs=2),
        state((3,), repetition_penalty=1.3, temperature=1.5, top_p=0.8, seed=12),
        state(logprobs=3),
    ]
    logits = random_logits(len(requests)).to(dtype)
    whole = sample(logits, requests)
    assert sample_where_numbers(logits, requests) == whole
    for row in range(len(requests)):
        broken = logits.clone()
        broken[row, at] = value
        expected: list[SampledToken | None] = [*whole]
        expected[row] = None
        assert sample_where_numbers(broken, requests) == expected
    assert sample_where_numbers(torch.full_like(logits, value), requests) == [None] * 4


def test_a_row_of_which_nothing_is_left_gives_no_token_and_one_with_something_left_does() -> None:
    logits = torch.full((2, VOCAB), -math.inf)
    logits[1, 5] = -3.0
    assert sample_where_numbers(logits, [None, state(logprobs=1)]) == [
        None,
        sample(logits[1:], [state(logprobs=1)])[0],
    ]
    assert sample_where_numbers(logits[:0], []) == []


def test_the_largest_bias_and_mask_of_a_request_leave_numbers() -> None:
    requests: list[SamplingState | None] = [
        state(logit_bias=tuple((token, -100.0) for token in range(VOCAB)), temperature=1.0, seed=3),
        state(stop_token_ids=tuple(range(VOCAB)), min_tokens=1, logprobs=1),
        state(stop_token_ids=tuple(range(VOCAB)), min_tokens=1, temperature=1.0, seed=3),
    ]
    logits = random_logits(3)
    biased, *masked = sample(logits, requests)
    assert biased == sample(logits, [state(temperature=1.0, seed=3), *requests[1:]])[0]
    assert [token.token_id for token in masked] == [0, 0]  # all is masked: the lowest id


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_does_not_carry_a_huge_logit_to_infinity(temperature: float) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 3e38
    request = state((9,), repetition_penalty=0.01, temperature=temperature, seed=1)
    assert sample(logits, [request])[0].token_id == 9

"""Each change of the logits against the processor of the same name in transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cp_shared_kv.engine.sampling.filters import keep_min_p, keep_top_k, keep_top_p, scale
from cp_shared_kv.engine.sampling.logit_edits import edit_logits
from cp_shared_kv.engine.sampling.state import SamplingState, prompt_tokens_for_sampling
from cp_shared_kv.transfer.sampling_params import SamplingParams

VOCAB, EOS = 500, 7
PROMPT, OUTPUT = [3, 5, 5, 9, 250], [5, 11, 11, 400]
TEMPERATURE = 0.7


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)) * 4


def ours(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    wanted = SamplingParams(**params)
    requests: list[SamplingState] = []
    for _ in logits:
        prompt = prompt_tokens_for_sampling(wanted, np.array(PROMPT, dtype=np.int64))
        request = SamplingState(
            wanted, vocab_size=VOCAB, eos_token_ids=(EOS,), prompt_token_ids=prompt
        )
        for token in OUTPUT:
            request.append(token)
        requests.append(request)
    scores = logits.clone()
    edit_logits(scores, requests)
    return scores


def theirs(processor: Any, logits: torch.Tensor) -> torch.Tensor:
    ids = torch.tensor([PROMPT + OUTPUT] * len(logits))
    return processor(ids, logits.clone())


@pytest.mark.parametrize("penalty", [1.3, 0.6])
def test_repetition_penalty(logits: torch.Tensor, penalty: float) -> None:
    expected = theirs(RepetitionPenaltyLogitsProcessor(penalty), logits)
    assert torch.equal(ours(logits, repetition_penalty=penalty), expected)


def test_bias_of_single_tokens(logits: torch.Tensor) -> None:
    bias = {5: -3.5, 77: 100.0, 400: 0.25}
    expected = theirs(SequenceBiasLogitsProcessor({(t,): b for t, b in bias.items()}), logits)
    assert torch.equal(ours(logits, logit_bias=tuple(bias.items())), expected)


@pytest.mark.parametrize("least", [4, 5])
def test_least_new_tokens(logits: torch.Tensor, least: int) -> None:
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), least, [EOS, 30], device="cpu")
    found = ours(logits, min_tokens=least, stop_token_ids=(30,))
    assert torch.equal(found, theirs(processor, logits))


def test_temperature(logits: torch.Tensor) -> None:
    expected = theirs(TemperatureLogitsWarper(TEMPERATURE), logits)
    found = scale(logits, [TEMPERATURE] * 4)
    torch.testing.assert_close(torch.softmax(found, -1), torch.softmax(expected, -1))


@pytest.mark.parametrize("top_k", [1, 17, VOCAB])
def test_top_k(logits: torch.Tensor, top_k: int) -> None:
    assert torch.equal(keep_top_k(logits, [top_k] * 4), theirs(TopKLogitsWarper(top_k), logits))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 0.999])
def test_top_p(logits: torch.Tensor, top_p: float) -> None:
    assert torch.equal(keep_top_p(logits, [top_p] * 4), theirs(TopPLogitsWarper(top_p), logits))


@pytest.mark.parametrize("min_p", [0.01, 0.2, 0.9])
def test_min_p(logits: torch.Tensor, min_p: float) -> None:
    scaled = scale(logits, [1.0] * 4)
    assert torch.equal(keep_min_p(scaled, [min_p] * 4), theirs(MinPLogitsWarper(min_p), scaled))


def test_all_filters_of_a_row_in_vllms_order(logits: torch.Tensor) -> None:
    scaled = scale(logits, [TEMPERATURE] * 4)
    found = keep_top_p(keep_top_k(keep_min_p(scaled, [0.02] * 4), [20] * 4), [0.9] * 4)
    expected = scaled
    for processor in (MinPLogitsWarper(0.02), TopKLogitsWarper(20), TopPLogitsWarper(0.9)):
        expected = theirs(processor, expected)
    assert torch.equal(found, expected)

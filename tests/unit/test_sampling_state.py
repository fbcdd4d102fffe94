"""What is kept of a request between two of its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cp_shared_kv.engine.sampling.history import TokenHistory
from cp_shared_kv.engine.sampling.state import SamplingState, prompt_tokens_for_sampling
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.transfer.sampling_params import SamplingParams

EOS = 2


def state(prompt: tuple[int, ...] = (), **params: Any) -> SamplingState:
    return SamplingState(
        SamplingParams(**params),
        vocab_size=10,
        eos_token_ids=(EOS,),
        prompt_token_ids=np.array(prompt, dtype=np.int64),
    )


def counted(history: TokenHistory) -> dict[int, int]:
    return dict(zip(history.token_ids.tolist(), history.output_counts.tolist(), strict=True))


def test_prompt_tokens_are_seen_but_not_put_out() -> None:
    history = TokenHistory(np.array([3, 8], dtype=np.int64))
    assert counted(history) == {3: 0, 8: 0}
    for token in (8, 5, 8):
        history.append(token)
    assert counted(history) == {3: 0, 8: 2, 5: 1}


def test_a_long_output_is_counted_without_a_loss() -> None:
    history = TokenHistory(np.arange(3, dtype=np.int64))
    tokens = [int(t) for t in np.random.default_rng(0).integers(0, 900, 5000)]
    for token in tokens:
        history.append(token)
    expected = {t: tokens.count(t) for t in {*tokens, 0, 1, 2}}
    assert counted(history) == expected


def test_only_the_repetition_penalty_needs_the_prompt() -> None:
    tokens = np.array([7, 3, 7, 7, 1], dtype=np.int64)
    neutral = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0, temperature=1.0)
    assert prompt_tokens_for_sampling(neutral, tokens).tolist() == []
    needed = prompt_tokens_for_sampling(SamplingParams(repetition_penalty=1.1), tokens)
    assert needed.tolist() == [1, 3, 7]


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        ({}, True),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.5, "seed": 5}, True),  # they only narrow a draw
        ({"temperature": 1e-6}, True),
        ({"logprobs": 5}, True),
        ({"stop_token_ids": (4,)}, True),
        ({"ignore_eos": True, "min_tokens": 5}, True),
        ({"temperature": 1e-5}, False),
        ({"logit_bias": ((1, 0.5),)}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"min_tokens": 1}, False),
        ({"ignore_eos": True, "stop_token_ids": (4,), "min_tokens": 1}, False),
    ],
)
def test_what_cannot_change_the_choice_leaves_a_row_plain(
    params: dict[str, Any], plain: bool
) -> None:
    assert state(**params).is_plain is plain


def test_a_row_is_plain_again_when_it_has_its_least_tokens() -> None:
    request = state(min_tokens=2)
    plain = [request.is_plain]
    for token in (5, 5):
        request.append(token)
        plain.append(request.is_plain)
    assert plain == [False, False, True]


@pytest.mark.parametrize(
    ("params", "ending"),
    [
        ({}, {EOS}),
        ({"stop_token_ids": (4, 5)}, {EOS, 4, 5}),
        ({"ignore_eos": True}, set()),
        ({"ignore_eos": True, "stop_token_ids": (4,)}, {4}),
        ({"ignore_eos": True, "stop_token_ids": (EOS,)}, {EOS}),
    ],
)
def test_eos_and_stop_ids_end_the_output(params: dict[str, Any], ending: set[int]) -> None:
    assert {token for token in range(10) if state(**params).append(token)} == ending


def test_nothing_ends_the_output_before_its_least_tokens() -> None:
    request = state(min_tokens=2)
    assert [request.append(EOS) for _ in range(3)] == [False, False, True]
    assert request.position == 3


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ((10,), {"repetition_penalty": 1.1}),
        ((), {"stop_token_ids": (10,)}),
        ((), {"logit_bias": ((10, 1.0),)}),
    ],
)
def test_an_id_beyond_the_vocabulary_is_refused_before_it_is_an_index(
    prompt: tuple[int, ...], params: dict[str, Any]
) -> None:
    with pytest.raises(ProtocolError, match="10"):
        state(prompt, **params)

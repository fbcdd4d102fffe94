"""What holds of filters and draws for any logits, any params, and any company in the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from cp_shared_kv.engine.sampling.filters import keep_min_p, keep_top_k, keep_top_p, scale
from cp_shared_kv.engine.sampling.sampler import sample
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.transfer.sampling_params import SamplingParams

VOCAB = 24
# Quarters, so that ties are common.
LOGITS = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB).map(
    lambda values: [v / 4 for v in values]
)
TOKENS = st.integers(0, VOCAB - 1)


def maybe(neutral: Any, others: SearchStrategy[Any]) -> SearchStrategy[Any]:
    return st.one_of(st.just(neutral), others)


PARAMS = st.builds(
    SamplingParams,
    temperature=maybe(0.0, st.floats(1e-5, 10)),
    top_p=maybe(1.0, st.floats(0.01, 1)),
    top_k=maybe(0, st.integers(1, VOCAB + 3)),
    min_p=maybe(0.0, st.floats(0, 1)),
    repetition_penalty=maybe(1.0, st.floats(0.5, 2)),
    presence_penalty=maybe(0.0, st.floats(-2, 2)),
    frequency_penalty=maybe(0.0, st.floats(-2, 2)),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=4).map(
        lambda given: tuple(given.items())
    ),
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    stop_token_ids=st.lists(TOKENS, max_size=3).map(tuple),
    min_tokens=st.integers(0, 4),
    logprobs=st.one_of(st.none(), st.integers(0, 5)),
)
ROWS = st.lists(
    st.tuples(LOGITS, PARAMS, st.lists(TOKENS, max_size=6), st.lists(TOKENS, max_size=5)),
    min_size=1,
    max_size=5,
)


def request(params: SamplingParams, prompt: list[int], output: list[int]) -> SamplingState:
    made = SamplingState(
        params,
        vocab_size=VOCAB,
        eos_token_ids=(0,),
        prompt_token_ids=np.unique(np.array(prompt, dtype=np.int64)),
    )
    for token in output:
        made.append(token)
    return made


@settings(max_examples=60, deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_a_row_is_chosen_the_same_in_any_batch_in_any_order(rows: Any, random: Any) -> None:
    logits = torch.tensor([row[0] for row in rows])
    requests = [request(params, prompt, output) for _, params, prompt, output in rows]
    together = sample(logits, requests)
    order = list(range(len(rows)))
    random.shuffle(order)
    order = order[: random.randint(1, len(order))]
    assert sample(logits[order], [requests[i] for i in order]) == [together[i] for i in order]
    assert all(0 <= token.token_id < VOCAB for token in together)


@settings(max_examples=60, deadline=None)
@given(
    LOGITS,
    st.floats(1e-5, 10),
    st.floats(0, 1),
    st.integers(0, VOCAB + 3),
    st.floats(0.001, 1),
)
def test_filters_keep_the_likeliest_and_never_one_less_likely_than_one_they_drop(
    logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    scores = scale(torch.tensor([logits]), [temperature])
    for filtered in (
        keep_min_p(scores, [min_p]),
        keep_top_k(scores, [top_k]),
        keep_top_p(scores, [top_p]),
        keep_top_p(keep_top_k(keep_min_p(scores, [min_p]), [top_k]), [top_p]),
    ):
        kept = filtered[0] > -torch.inf
        assert kept[scores[0].argmax()]
        assert torch.equal(filtered[0][kept], scores[0][kept])
        if not kept.all():
            assert scores[0][kept].min() >= scores[0][~kept].max()


@settings(max_examples=60, deadline=None)
@given(LOGITS, st.integers(1, VOCAB), st.floats(0.001, 0.999))
def test_filters_keep_as_many_as_they_say(logits: list[float], top_k: int, top_p: float) -> None:
    scores = scale(torch.tensor([logits]), [1.0])
    assert int((keep_top_k(scores, [top_k]) > -torch.inf).sum()) >= top_k
    nucleus = keep_top_p(scores, [top_p])[0] > -torch.inf
    kept = torch.softmax(scores[0].double(), -1)[nucleus].sort().values
    assert kept.sum() >= top_p - 1e-9
    assert kept[1:].sum() < top_p + 1e-9  # without its least likely token it is too small


@settings(max_examples=30, deadline=None)
@given(LOGITS, PARAMS, st.integers(0, 5))
def test_alternatives_are_the_largest_and_their_logs_are_of_probabilities(
    logits: list[float], params: SamplingParams, count: int
) -> None:
    made = request(SamplingParams(temperature=1.0, seed=params.seed, logprobs=count), [], [])
    token, told = sample(torch.tensor([logits]), [made])[0]
    assert told is not None
    ranked = sorted(range(VOCAB), key=lambda t: (-logits[t], t))[:count]
    assert [t for t, _ in told.top] == ranked
    expected = torch.log_softmax(torch.tensor(logits), -1)
    assert told.logprob == float(expected[token])

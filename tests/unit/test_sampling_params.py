"""What a front end may ask of the sampler, and the form in which it travels."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from cp_shared_kv.engine.api import EngineRefusal, Sampling
from cp_shared_kv.engine.sampling.wire_params import wire_params
from cp_shared_kv.transfer.sampling_params import (
    MAX_LOGIT_BIAS_TOKENS,
    MAX_STOP_TOKEN_IDS,
    SampledLogprobs,
    SamplingParams,
)

EVERYTHING = Sampling(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    repetition_penalty=1.2,
    presence_penalty=-0.5,
    frequency_penalty=0.25,
    logit_bias={5: -100.0, 7: 2.5},
    seed=-3,
    ignore_eos=True,
    stop_token_ids=[9, 11],
    min_tokens=4,
    logprobs=20,
)


def test_the_defaults_of_both_forms_are_greedy_and_equal() -> None:
    assert wire_params(Sampling()) == SamplingParams()
    assert msgspec.msgpack.encode(SamplingParams()) == msgspec.msgpack.encode({})


def test_every_field_travels() -> None:
    params = wire_params(EVERYTHING)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    told = msgspec.to_builtins(params)
    assert set(told) == set(Sampling.__dataclass_fields__)  # none is at its default
    assert told.pop("logit_bias") == ((5, -100.0), (7, 2.5))
    assert told.pop("stop_token_ids") == (9, 11)
    assert all(value == getattr(EVERYTHING, name) for name, value in told.items())


def test_a_request_without_a_seed_is_given_one_of_its_own() -> None:
    seeds = {wire_params(Sampling(temperature=1.0)).seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 1 << 63 for seed in seeds)


@pytest.mark.parametrize("seed", [0, -(1 << 63), (1 << 63) - 1])
def test_a_seed_of_the_client_is_kept(seed: int) -> None:
    assert wire_params(Sampling(temperature=1.0, seed=seed)).seed == seed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.001),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 1 << 31),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 101.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1 << 31: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS_TOKENS + 1), 1.0)),
        ("seed", 1 << 63),
        ("seed", -(1 << 63) - 1),
        ("ignore_eos", 1),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", range(MAX_STOP_TOKEN_IDS + 1)),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
    ],
)
def test_a_value_out_of_bounds_is_the_clients_to_change_and_named(field: str, value: Any) -> None:
    with pytest.raises(EngineRefusal, match=field) as refused:
        wire_params(Sampling(**{field: value}))
    assert refused.value.kind == "invalid"


def test_a_token_has_one_bias_only() -> None:
    data = msgspec.msgpack.encode({"logit_bias": [(3, 1.0), (4, 1.0), (3, 2.0)]})
    with pytest.raises(msgspec.ValidationError, match="twice"):
        msgspec.msgpack.decode(data, type=SamplingParams)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (SamplingParams(logit_bias=((1, 1.0), (10, 1.0))), "logit_bias holds token id 10"),
        (SamplingParams(stop_token_ids=(12, 3)), "stop_token_ids holds token id 12"),
    ],
)
def test_a_token_id_beyond_the_vocabulary_is_named(params: SamplingParams, named: str) -> None:
    with pytest.raises(ValueError, match=named + "; allowed: 0 to 9"):
        params.check_vocabulary(10)
    params.check_vocabulary(13)
    SamplingParams().check_vocabulary(1)


def test_more_alternatives_than_may_be_asked_for_are_refused() -> None:
    data = msgspec.msgpack.encode({"logprob": -1.0, "top": [(i, -1.0) for i in range(21)]})
    with pytest.raises(msgspec.ValidationError, match="top"):
        msgspec.msgpack.decode(data, type=SampledLogprobs)

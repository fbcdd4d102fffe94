"""What a client says about sampling reaches the engine; what it leaves open has its defaults."""

from __future__ import annotations

import json

import pytest

from cp_shared_kv.engine.api import Sampling
from cp_shared_kv.errors import CheckpointError
from cp_shared_kv.server.generation_defaults import GenerationDefaults


def create(client, **fields):
    return client.completions.create(model="fake-model", prompt="x", **fields)


def test_every_parameter_reaches_the_engine(client, engine):
    create(
        client,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"5": 1.5, "6": -100},
        seed=-7,
        logprobs=3,
        max_tokens=9,
        extra_body={
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "stop_token_ids": [1, 2],
            "min_tokens": 4,
        },
    )
    assert engine.requests[0].sampling == Sampling(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={5: 1.5, 6: -100},
        seed=-7,
        ignore_eos=True,
        stop_token_ids=(1, 2),
        min_tokens=4,
        logprobs=3,
    )


def test_what_is_left_open_has_openais_defaults(client, engine):
    create(client)
    assert engine.requests[0].sampling == Sampling(temperature=1.0)


@pytest.mark.parametrize("top_k", [-1, 0])
def test_both_ways_to_say_every_token(client, engine, top_k):
    create(client, extra_body={"top_k": top_k})
    assert engine.requests[0].sampling.top_k == 0


# The checkpoint's defaults -----------------------------------------------------------------------


def defaults_of(tmp_path, config) -> GenerationDefaults:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    return GenerationDefaults.from_directory(tmp_path)


def test_a_checkpoint_without_generation_config_changes_nothing(tmp_path):
    assert GenerationDefaults.from_directory(tmp_path) == GenerationDefaults(temperature=1.0)


def test_a_checkpoints_values_are_taken_and_the_rest_stays(tmp_path):
    config = {
        "temperature": 0.6,
        "top_p": 0.95,
        "do_sample": True,
        "eos_token_id": 3,
        "top_k": None,
    }
    assert defaults_of(tmp_path, config) == GenerationDefaults(temperature=0.6, top_p=0.95)


def test_do_sample_false_means_greedy(tmp_path):
    assert defaults_of(tmp_path, {"do_sample": False, "temperature": 0.6}).temperature == 0


@pytest.mark.parametrize(
    "config", [{"temperature": "hot"}, {"top_p": 3}, {"top_k": 0.5}, {"min_p": []}], ids=str
)
def test_a_value_that_no_request_could_have_is_named(tmp_path, config):
    with pytest.raises(CheckpointError, match=next(iter(config))):
        defaults_of(tmp_path, config)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        GenerationDefaults.from_directory(tmp_path)


def test_a_request_goes_before_its_checkpoint(own_server, openai_client):
    server, engine = own_server(defaults=GenerationDefaults(temperature=0.6, top_k=20))
    with openai_client(server) as client:
        create(client)
        create(client, temperature=0, extra_body={"top_k": -1})
    assert engine.requests[0].sampling == Sampling(temperature=0.6, top_k=20)
    assert engine.requests[1].sampling == Sampling()

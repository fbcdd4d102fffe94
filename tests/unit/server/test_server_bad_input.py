"""Every bad request gets a 4xx in OpenAI's shape that names the field, and harms nothing."""

from __future__ import annotations

import json

import openai
import pytest


def error_of(response, status: int) -> dict:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    return body["error"]


def post(http, **fields):
    return http.post("/v1/completions", json={"model": "fake-model", "prompt": "x", **fields})


@pytest.fixture(autouse=True)
def next_request_is_served(http, engine):
    yield
    answer = post(http)
    assert answer.status_code == 200
    assert engine.aborted == []
    assert len(engine.requests) == 1, "a bad request reached the engine"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": ["x", "y"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, 260]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**63]}, "prompt"),
        ({"prompt": [10**400]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": 7.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"model": 3}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"seed": "x"}, "seed"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**40}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"echo": 1}, "echo"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [260]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"min_tokens": 800}, "min_tokens"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"260": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": 1e9}, "timeout"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"no_such_thing": 1}, "no_such_thing"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else None,
)
def test_a_field_that_cannot_be_served_is_named(http, fields, param):
    assert error_of(post(http, **fields), 400)["param"] == param


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 300}, "temperature is 300.0; allowed: 0 to 100"),
        ({"top_p": 0}, "top_p is 0.0; allowed: more than 0 and at most 1"),
        ({"top_k": -7}, "top_k is -7; allowed: -1 to 2147483647 (-1 and 0 keep every token)"),
        ({"best_of": 2}, "best_of is not supported with this value; allowed: null or n"),
        ({"stop": ["x"] * 20}, "stop has 20 entries; allowed: up to 16"),
        ({"logit_bias": {"x": 1}}, "logit_bias has the key 'x'; allowed: token ids 0 to 259"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_bad_value_is_told_with_what_is_allowed(http, fields, words):
    assert words in error_of(post(http, **fields), 400)["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'"text"',
        b"[]",
        b"null",
        b'{"model": "fake-model", "prompt": "x"} trailing',
        b'{"model": "fake-model", "prompt": "\xff"}',
        b'{"model": "fake-model", "prompt": "\\ud800"}',
        b'{"model": "fake-model", "prompt": "x", "temperature": NaN}',
        b'{"model": "fake-model", "prompt": "x", "temperature": Infinity}',
        b'{"model": "fake-model", "prompt": "x", "temperature": 1e999}',
        b'{"model": "fake-model", "prompt": ' + b"[" * 100_000,
        b'{"a": ' * 100_000,
    ],
    ids=lambda body: repr(body[:60]),
)
def test_what_is_not_a_json_object_is_refused(http, body):
    error_of(http.post("/v1/completions", content=body), 400)


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field_is_named(http, missing):
    body = {"model": "fake-model", "prompt": "x"}
    del body[missing]
    error = error_of(http.post("/v1/completions", json=body), 400)
    assert error["param"] == missing
    assert "missing" in error["message"]


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-5", prompt="x")
    assert caught.value.code == "model_not_found"
    assert "fake-model" in caught.value.message


def test_unknown_paths_and_methods(http):
    assert "/docs lists all" in error_of(http.get("/v1/nothing"), 404)["message"]
    error_of(http.post("/"), 405)
    error_of(http.post("/nothing"), 404)
    response = http.get("/v1/completions")
    assert error_of(response, 405)["message"] == "GET is not allowed here; allowed: POST"
    assert response.headers["allow"] == "POST"
    assert "allowed: GET, HEAD" in error_of(http.delete("/v1/models"), 405)["message"]


def test_errors_never_repeat_the_prompt(http):
    for fields in ({"n": 0}, {"prompt": ["secret", "y"]}, {"max_tokens": 10**6}):
        assert "secret" not in post(http, **{"prompt": "secret", **fields}).text


# Sizes: logical_tokens 512, decode_tokens 768, context_length 1024 -------------------------------


def test_a_prompt_over_the_logical_capacity_is_told_so_at_once(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake-model", prompt=[1] * 513, max_tokens=1)
    message = caught.value.message
    assert "513 tokens" in message
    assert "at most 512 tokens (logical KV capacity of the prefill group)" in message
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"


def test_prompt_plus_output_over_the_decode_capacity_is_told_so(http):
    message = error_of(post(http, prompt=[1] * 500, max_tokens=269), 400)["message"]
    assert "500 tokens" in message
    assert "max_tokens 269" in message
    assert "at most 768 tokens (KV capacity of the decode worker)" in message


def test_a_huge_max_tokens_names_the_limit(http):
    message = error_of(post(http, max_tokens=2**62), 400)["message"]
    assert "at most 768 tokens" in message


def test_a_text_is_measured_in_tokens(http):
    assert "600 tokens" in error_of(post(http, prompt="€" * 200), 400)["message"]

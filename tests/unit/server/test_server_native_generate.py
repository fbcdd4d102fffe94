"""POST /generate as SGLang's clients know it, over a real socket."""

from __future__ import annotations

import json

import pytest

from cp_shared_kv.engine.api import EngineRefusal

EOS = 257


def generate(http, **fields):
    return http.post("/generate", json={"text": "Hello", **fields})


def answered(http, **fields):
    response = generate(http, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def events(http, **fields) -> list[dict]:
    response = generate(http, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def refused(http, **fields) -> dict:
    response = generate(http, **fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_an_output_has_its_text_its_tokens_and_the_counts(http, engine):
    engine.cached_tokens = 3
    output = answered(http, sampling_params={"max_new_tokens": 4})
    assert output["text"] == "the "
    assert output["output_ids"] == list(b"the ")
    meta = output["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 4, 3)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert engine.requests[0].request_id == meta["id"]
    assert list(engine.requests[0].prompt_token_ids) == list(b"Hello")


def test_token_ids_are_a_prompt_as_they_are(http, engine):
    answered(http, text=None, input_ids=[7, 8, 9])
    assert list(engine.requests[0].prompt_token_ids) == [7, 8, 9]


def test_every_event_has_all_of_the_output_so_far(http):
    told = events(http, sampling_params={"max_new_tokens": 3})
    assert [event["text"] for event in told] == ["t", "th", "the"]
    assert [event["output_ids"] for event in told] == [[*b"t"], [*b"th"], [*b"the"]]
    assert [event["meta_info"]["completion_tokens"] for event in told] == [1, 2, 3]
    ends = [event["meta_info"]["finish_reason"] for event in told]
    assert ends == [None, None, {"type": "length", "length": 3}]


def test_tokens_that_make_no_text_yet_are_told_all_the_same(http, engine):
    engine.output = list("€".encode())
    told = events(http)
    assert [event["text"] for event in told] == ["", "", "€"]
    assert [event["meta_info"]["completion_tokens"] for event in told] == [1, 2, 3]


def test_a_stream_that_fails_on_the_way_ends_with_the_error(http, engine):
    engine.refusal, engine.refuse_after_tokens = EngineRefusal("a rank was lost", kind="failed"), 2
    response = generate(http, stream=True)
    *told, last, end = response.text.split("\n\n")
    assert len(told) == 2
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_failed"
    assert end == ""


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_says_what_ended_the_output(http, engine, stream):
    def last(**sampling) -> dict:
        told = (events if stream else answered)(http, sampling_params=sampling)
        return told[-1] if stream else told

    engine.output = [*b"one two", EOS]
    by_token = last()
    assert by_token["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert by_token["text"] == "one two"
    assert by_token["output_ids"] == [*b"one two", EOS]
    by_string = last(stop=" t")
    assert by_string["meta_info"]["finish_reason"] == {"type": "stop", "matched": " t"}
    assert by_string["text"] == "one"


def test_without_a_number_there_are_at_most_128_tokens(http, engine):
    answered(http)
    assert engine.requests[0].max_tokens == 128


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_stand_beside_each_token(http, engine, stream):
    engine.output = [*b"ab", EOS]
    fields = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    output = events(http, **fields)[-1] if stream else answered(http, **fields)
    meta = output["meta_info"]
    assert meta["output_token_logprobs"] == [
        [-0.97, 97, "a"],
        [-0.98, 98, "b"],
        [-2.57, EOS, "</s>"],
    ]
    assert meta["output_top_logprobs"][0] == [[-0.97, 97, "a"], [-0.98, 98, "b"]]
    assert len(meta["output_top_logprobs"]) == len(output["output_ids"]) == 3


def test_log_probabilities_are_told_where_asked_for_and_texts_too(http):
    assert "output_token_logprobs" not in answered(http)["meta_info"]
    meta = answered(http, return_logprob=True, sampling_params={"max_new_tokens": 1})["meta_info"]
    assert meta["output_token_logprobs"] == [[-1.16, 116, None]]
    assert "output_top_logprobs" not in meta


def test_several_outputs_are_a_list_or_events_with_an_index(http, engine):
    engine.outputs = [list(b"one"), list(b"two"), list(b"one"), list(b"two")]
    sampling = {"n": 2, "max_new_tokens": 3}
    outputs = answered(http, sampling_params=sampling)
    assert [output["text"] for output in outputs] == ["one", "two"]
    assert [output["meta_info"]["completion_tokens"] for output in outputs] == [3, 3]
    last = {event["index"]: event for event in events(http, sampling_params=sampling)}
    assert {index: event["text"] for index, event in last.items()} == {0: "one", 1: "two"}


def test_sampling_parameters_reach_the_engine_by_their_meaning(http, engine):
    answered(
        http,
        sampling_params={
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "logit_bias": {"65": 2},
            "sampling_seed": 11,
            "min_new_tokens": 2,
            "max_new_tokens": 9,
            "stop_token_ids": [1],
            "ignore_eos": True,
        },
    )
    request = engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5,
        0.9,
        5,
        0.1,
    )
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.1, 0.2)
    assert (sampling.frequency_penalty, sampling.logit_bias) == (0.3, {65: 2})
    assert (sampling.seed, sampling.min_tokens, request.max_tokens) == (11, 2, 9)
    assert (list(sampling.stop_token_ids), sampling.ignore_eos) == ([1], True)


def test_what_bench_serving_sends_is_taken(http):
    output = answered(
        http,
        sampling_params={"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True},
        lora_path=None,
        return_logprob=False,
        return_routed_experts=False,
        logprob_start_len=-1,
    )
    assert output["meta_info"]["completion_tokens"] == 2


def test_an_answer_is_ended_by_its_rid_and_says_so(http, engine):
    engine.stall_after_tokens = 2
    with http.stream("POST", "/generate", json={"text": "x", "rid": "mine", "stream": True}) as got:
        lines = (line for line in got.iter_lines() if line)
        first = json.loads(next(lines).removeprefix("data: "))
        assert engine.stalled.wait(5)
        assert http.post("/abort_request", json={"rid": "mine"}).json() == {"aborted_requests": 1}
        *_, last, done = lines
    assert first["meta_info"]["id"] == "mine"
    assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"
    assert done == "data: [DONE]"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": None}, "text"),
        ({"text": ""}, "text"),
        ({"text": ["a", "b"]}, "text"),
        ({"input_ids": [1]}, "input_ids"),
        ({"text": None, "input_ids": []}, "input_ids"),
        ({"text": None, "input_ids": [260]}, "input_ids"),
        ({"text": None, "input_ids": [[1], [2]]}, "input_ids"),
        ({"rid": ""}, "rid"),
        ({"return_logprob": True, "logprob_start_len": 0}, "logprob_start_len"),
        ({"top_logprobs_num": 2}, "top_logprobs_num"),
        ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"token_ids_logprob": [3]}, "token_ids_logprob"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"lora_path": "adapter"}, "lora_path"),
        ({"image_data": "x"}, "image_data"),
        ({"sampling_params": {"max_tokens": 3}}, "sampling_params"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling_params": {"min_new_tokens": -1}}, "min_new_tokens"),
        ({"sampling_params": {"min_new_tokens": 5, "max_new_tokens": 4}}, "min_new_tokens"),
        ({"sampling_params": {"min_new_tokens": 4000}}, "min_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 4000}}, "text"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"n": 0}}, "n"),
        ({"sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ({"sampling_params": {"regex": "a"}}, "regex"),
        ({"sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ({"sampling_params": {"skip_special_tokens": False}}, "skip_special_tokens"),
        ({"sampling_params": {"no_stop_trim": True}}, "no_stop_trim"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_own_name(http, engine, fields, param):
    assert refused(http, **fields)["param"] == param
    assert engine.requests == []


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info_says_where_the_tokenizer_is(http, path):
    assert http.get(path).json() == {
        "model_path": "/models/fake",
        "tokenizer_path": "/models/fake",
        "served_model_name": "fake-model",
        "is_generation": True,
    }

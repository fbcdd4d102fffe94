"""POST /abort_request: who is ended by it, what its client sees, and that nobody else is."""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from cp_shared_kv.server.settings import ServerSettings

BODY = {"model": "fake-model", "prompt": "x"}


def abort(http, **body) -> int:
    response = http.post("/abort_request", json=body)
    assert response.status_code == 200
    return response.json()["aborted_requests"]


def abort_as_soon_as_it_is_there(http, **body) -> None:
    deadline = time.monotonic() + 10
    while abort(http, **body) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["rid", "request_id", "x-request-id"])
@pytest.mark.parametrize("stall_after", [0, 3], ids=["queued", "decoding"])
def test_a_whole_answer_ends_with_what_there_is(http, engine, name, stall_after):
    engine.stall_after_tokens = stall_after
    headers = {"x-request-id": "mine"} if name == "x-request-id" else {}
    body = BODY if headers else BODY | {name: "mine"}
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(http.post, "/v1/completions", json=body, headers=headers)
        assert engine.stalled.wait(10)
        abort_as_soon_as_it_is_there(http, rid="mine")
        response = answer.result()
    assert response.status_code == 200
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "abort"
    assert choice["text"] == "the answer"[:stall_after]
    assert response.json()["usage"]["completion_tokens"] == stall_after
    assert engine.aborted == [engine.requests[0].request_id]
    assert abort(http, rid="mine") == 0


def test_a_stream_ends_by_the_id_that_it_tells(http, engine):
    engine.stall_after_tokens = 3
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", "/v1/completions", json=body) as response:
        events = (line[6:] for line in response.iter_lines() if line)
        told = [json.loads(next(events)) for _ in range(3)]
        assert abort(http, rid=told[0]["id"]) == 1
        *rest, last = list(events)
    assert last == "[DONE]"
    end, usage = map(json.loads, rest)
    assert end["choices"][0]["finish_reason"] == "abort"
    assert usage["usage"]["completion_tokens"] == 3
    assert engine.aborted == [engine.requests[0].request_id]


def test_a_chat_ends_in_its_own_format(http, engine):
    engine.stall_after_tokens = 2
    body = {"model": "fake-model", "messages": [{"role": "user", "content": "x"}], "rid": "chat"}
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(http.post, "/v1/chat/completions", json=body)
        abort_as_soon_as_it_is_there(http, rid="chat")
        (choice,) = answer.result().json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("abort", "th")


def test_all_choices_of_an_answer_end_and_those_that_are_over_stay_so(http, engine):
    engine.outputs = [[*b"one", 257], list(b"the second")]
    engine.stall_after_tokens = 4
    with ThreadPoolExecutor(1) as clients:
        body = BODY | {"n": 2, "rid": "two"}
        answer = clients.submit(http.post, "/v1/completions", json=body)
        while len(engine.requests) < 2:
            time.sleep(0.01)
        time.sleep(0.1)
        abort_as_soon_as_it_is_there(http, rid="two")
        choices = answer.result().json()["choices"]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [
        ("one", "stop"),
        ("the ", "abort"),
    ]
    assert engine.aborted == [engine.requests[1].request_id]


def test_nobody_else_is_ended(http, engine):
    engine.stall_after_tokens = 1
    with ThreadPoolExecutor(2) as clients:
        answers = [
            clients.submit(http.post, "/v1/completions", json=BODY | {"rid": name})
            for name in ("a", "b")
        ]
        abort_as_soon_as_it_is_there(http, rid="a")
        assert answers[0].result().json()["choices"][0]["finish_reason"] == "abort"
        for other in ("", "B", "b ", "c", "cmpl-", "a"):
            assert abort(http, rid=other) == 0
        engine.release()
        assert answers[1].result().json()["choices"][0]["text"] == "the answer"


def test_two_of_one_name_both_end_and_abort_all_ends_everybody_once(http, engine):
    engine.stall_after_tokens = 1
    with ThreadPoolExecutor(3) as clients:
        answers = [
            clients.submit(http.post, "/v1/completions", json=BODY | {"rid": name})
            for name in ("same", "same", "other")
        ]
        while len(engine.requests) < 3:
            time.sleep(0.01)
        assert abort(http, rid="same") == 2
        assert abort(http, abort_all=True) == 1
        reasons = [a.result().json()["choices"][0]["finish_reason"] for a in answers]
    assert reasons == ["abort"] * 3
    assert abort(http, abort_all=True) == 0


def test_an_abort_within_a_timeout_is_an_abort(http, engine):
    engine.stall_after_tokens = 1
    with ThreadPoolExecutor(1) as clients:
        body = BODY | {"rid": "timed", "timeout": 60}
        answer = clients.submit(http.post, "/v1/completions", json=body)
        abort_as_soon_as_it_is_there(http, rid="timed")
        assert answer.result().status_code == 200


def test_the_log_says_so(http, engine, caplog):
    caplog.set_level(logging.INFO, logger="cp_shared_kv.server.access")
    engine.stall_after_tokens = 1
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(http.post, "/v1/completions", json=BODY | {"rid": "logged"})
        abort_as_soon_as_it_is_there(http, rid="logged")
        answer.result()
    deadline = time.monotonic() + 10  # the line is written when the answer has gone out
    while '"finish_reason": "abort"' not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{}", "rid"),
        (b'{"rid": 3}', "rid"),
        (b'{"abort_all": false}', "rid"),
        (b'{"rid": "a", "all": true}', "all"),
        (b"nonsense", None),
        (b"", None),
    ],
)
def test_what_says_nothing_is_refused(http, body, param):
    response = http.post("/abort_request", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("name", ["", "x" * 257])
@pytest.mark.parametrize("field", ["rid", "request_id"])
def test_a_request_cannot_have_any_name(http, engine, field, name):
    response = http.post("/v1/completions", json=BODY | {field: name})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert engine.requests == []


def test_it_needs_the_key(own_server):
    server, _ = own_server(settings=ServerSettings(api_key="sk-1"))
    assert httpx.post(f"{server.url}/abort_request", json={"rid": "a"}).status_code == 401

"""The `timeout` of a request: 504 and an abort when the answer is not complete in time."""

from __future__ import annotations

import json

import pytest

BODY = {"model": "fake-model", "prompt": "x", "timeout": 0.2}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stall_after", [0, 3])
def test_an_answer_in_one_piece_is_a_504(http, engine, n, stall_after):
    engine.stall_after_tokens = stall_after
    response = http.post("/v1/completions", json=BODY | {"n": n})
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["param"], error["code"], error["type"]) == ("timeout", "timeout", "server_error")
    assert "0.2 s" in error["message"]
    assert sorted(engine.aborted) == sorted(r.request_id for r in engine.requests)


def test_a_stream_that_has_begun_ends_with_an_error_event(http, engine):
    engine.stall_after_tokens = 3
    response = http.post("/v1/completions", json=BODY | {"stream": True})
    assert response.status_code == 200
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-1])["error"]["code"] == "timeout"
    assert len(events) == 4
    assert engine.aborted == [engine.requests[0].request_id]


def test_a_stream_that_has_not_begun_is_a_504(http, engine):
    engine.stall_after_tokens = 0
    assert http.post("/v1/completions", json=BODY | {"stream": True}).status_code == 504
    assert len(engine.aborted) == 1


def test_an_answer_in_time_is_whole(http, engine):
    body = BODY | {"timeout": 60}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == "the answer"
    assert engine.aborted == []

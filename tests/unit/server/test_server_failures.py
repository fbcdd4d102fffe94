"""What a client sees of an engine that refuses, fails, or is away."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from cp_shared_kv.engine.api import EngineRefusal

STREAM = {"model": "fake-model", "prompt": "x", "stream": True}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("kind", "status", "type_", "code"),
    [
        ("too_long", 400, "invalid_request_error", "context_length_exceeded"),
        ("invalid", 400, "invalid_request_error", "invalid_value"),
        ("overloaded", 503, "server_error", "overloaded"),
        ("unavailable", 503, "server_error", "unavailable"),
        ("failed", 500, "server_error", "request_failed"),
    ],
)
def test_a_refusal_before_the_first_token_has_its_http_status(
    http, engine, stream, kind, status, type_, code
):
    engine.refusal = EngineRefusal("the reason", kind=kind)
    response = http.post(
        "/v1/completions", json={"model": "fake-model", "prompt": "x", "stream": stream}
    )
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["message"], error["type"], error["code"]) == ("the reason", type_, code)
    assert ("retry-after" in response.headers) == (status == 503)
    assert engine.aborted == []


def test_a_failure_on_the_way_ends_the_stream_with_an_error_event(http, engine):
    engine.refusal = EngineRefusal("rank 2 was lost", kind="failed")
    engine.refuse_after_tokens = 3
    response = http.post("/v1/completions", json=STREAM)
    assert response.status_code == 200
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert [json.loads(e)["choices"][0]["text"] for e in events[:3]] == ["t", "h", "e"]
    assert json.loads(events[3])["error"] == {
        "message": "rank 2 was lost",
        "type": "server_error",
        "param": None,
        "code": "request_failed",
    }
    assert len(events) == 4


def test_openais_client_raises_at_the_error_event(client, engine):
    engine.refusal = EngineRefusal("rank 2 was lost", kind="failed")
    engine.refuse_after_tokens = 3
    chunks = iter(client.completions.create(**STREAM))
    assert "".join(next(chunks).choices[0].text for _ in range(3)) == "the"
    with pytest.raises(openai.APIError, match="rank 2 was lost"):
        next(chunks)


def test_a_failure_on_the_way_of_an_answer_in_one_piece_is_a_500(client, engine):
    engine.refusal = EngineRefusal("rank 2 was lost", kind="failed")
    engine.refuse_after_tokens = 3
    with pytest.raises(openai.InternalServerError, match="rank 2 was lost"):
        client.completions.create(model="fake-model", prompt="x")


def test_output_that_ends_without_a_reason_is_an_error_and_aborts_nothing(client, engine):
    engine.end_without_reason = True
    with pytest.raises(openai.InternalServerError, match="without a reason"):
        client.completions.create(model="fake-model", prompt="x")
    assert engine.aborted == []


def test_an_abort_by_the_engine_is_an_error_not_an_answer(client, engine):
    engine.abort_after_tokens = 2
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="fake-model", prompt="x")
    assert caught.value.status_code == 503


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_bug_is_a_500_without_details_and_aborts_the_request(http, engine, stream, caplog):
    engine.crash = RuntimeError("internal detail")
    response = http.post(
        "/v1/completions", json={"model": "fake-model", "prompt": "x", "stream": stream}
    )
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "internal detail" not in response.text
    assert "internal detail" in caplog.text
    assert engine.aborted == [engine.requests[0].request_id]


def test_health_follows_the_engine(http, engine):
    assert http.get("/health").status_code == 200
    engine.health = (False, "rank 1 is gone")
    response = http.get("/health")
    assert response.status_code == 503
    assert response.json()["reason"] == "rank 1 is gone"


def test_stopping_lets_answers_under_way_end(own_server):
    server, engine = own_server()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=STREAM, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        server.stop()
        assert any("[DONE]" in line for line in lines)
    assert engine.aborted == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_stopping_cuts_off_and_aborts_what_takes_too_long(own_server):
    server, engine = own_server(drain_seconds=1)
    engine.stall_after_tokens = 2
    with httpx.stream("POST", f"{server.url}/v1/completions", json=STREAM, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        server.stop()
        assert "the server is stopping" in "".join(lines)
    assert engine.aborted == [engine.requests[0].request_id]

"""Request ids and the log line."""

from __future__ import annotations

import json
import logging
import time

import pytest

LOGGER = "cp_shared_kv.server.access"


def line_of(caplog, response) -> dict:
    """The line of a response; it is written just after the client has its answer."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        messages = [r.getMessage() for r in caplog.records if r.name == LOGGER]
        assert all("\n" not in message for message in messages)
        for line in map(json.loads, messages):
            if line["request_id"] == response.headers["x-request-id"]:
                return line
        time.sleep(0.01)
    raise AssertionError("no log line")


@pytest.fixture(autouse=True)
def log_level(caplog):
    caplog.set_level(logging.INFO, logger=LOGGER)


def test_one_line_a_request_with_its_counts_and_no_prompt(http, engine, caplog):
    engine.cached_tokens = 4
    body = {"model": "fake-model", "prompt": "a secret", "max_tokens": 5, "stream": True}
    response = http.post("/v1/completions", json=body)
    line = line_of(caplog, response)
    assert line["path"] == "/v1/completions"
    assert line["status"] == 200
    assert line["prompt_tokens"] == 8
    assert line["completion_tokens"] == 5
    assert line["cached_tokens"] == 4
    assert line["finish_reason"] == "length"
    assert line["id"] == engine.requests[0].request_id
    assert 0 <= line["first_token_seconds"] <= line["seconds"]
    assert "secret" not in caplog.text


def test_the_clients_request_id_comes_back(http, caplog):
    for path, number in (("/v1/models", 1), ("/nothing", 2)):
        request_id = f"job-{number}:a.b_c"
        response = http.get(path, headers={"x-request-id": request_id})
        assert response.headers["x-request-id"] == request_id
        assert line_of(caplog, response)["path"] == path


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, 'a"b', "é"])
def test_an_unsound_request_id_is_replaced(http, sent):
    headers = {"x-request-id": sent.encode()}
    assert http.get("/v1/models", headers=headers).headers["x-request-id"].isalnum()


def test_two_requests_with_one_request_id_are_two_to_the_engine(http, engine):
    for _ in range(2):
        http.post(
            "/v1/completions",
            json={"model": "fake-model", "prompt": "x"},
            headers={"x-request-id": "same"},
        )
    assert len({r.request_id for r in engine.requests}) == 2


def test_a_path_cannot_forge_a_line(http, caplog):
    response = http.get('/x%0a{"status": 200}')
    assert line_of(caplog, response)["path"] == '/x\n{"status": 200}'


def test_probes_are_not_logged(http, caplog):
    http.get("/health")
    http.get("/metrics")
    line_of(caplog, http.get("/v1/models"))
    assert "/health" not in caplog.text
    assert "/metrics" not in caplog.text

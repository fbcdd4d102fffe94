"""Request ids and the log line."""

from __future__ import annotations

import json
import logging
import time

import pytest

LOGGER = "cp_shared_kv.server.access"


def lines(caplog, count: int = 1) -> list[dict]:
    """The log's lines; they are written just after the client has its answer."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = [r.getMessage() for r in caplog.records if r.name == LOGGER]
        if len(found) >= count:
            assert all("\n" not in line for line in found)
            return [json.loads(line) for line in found]
        time.sleep(0.01)
    raise AssertionError("no log line")


@pytest.fixture(autouse=True)
def log_level(caplog):
    caplog.set_level(logging.INFO, logger=LOGGER)


def test_one_line_a_request_with_its_counts_and_no_prompt(http, engine, caplog):
    engine.cached_tokens = 4
    body = {"model": "fake-model", "prompt": "a secret", "max_tokens": 5, "stream": True}
    response = http.post("/v1/completions", json=body)
    (line,) = lines(caplog)
    assert line["path"] == "/v1/completions"
    assert line["status"] == 200
    assert line["prompt_tokens"] == 8
    assert line["completion_tokens"] == 5
    assert line["cached_tokens"] == 4
    assert line["finish_reason"] == "length"
    assert line["id"] == engine.requests[0].request_id
    assert line["request_id"] == response.headers["x-request-id"]
    assert 0 <= line["first_token_seconds"] <= line["seconds"]
    assert "secret" not in caplog.text


def test_the_clients_request_id_comes_back(http, caplog):
    for path in ("/v1/models", "/nothing"):
        response = http.get(path, headers={"x-request-id": "job-17:a.b_c"})
        assert response.headers["x-request-id"] == "job-17:a.b_c"
    assert [line["request_id"] for line in lines(caplog, 2)] == ["job-17:a.b_c"] * 2


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
    http.get('/x%0a{"status": 200}')
    assert lines(caplog)[0]["path"] == '/x\n{"status": 200}'


def test_probes_are_not_logged(http, caplog):
    http.get("/health")
    http.get("/metrics")
    http.get("/v1/models")
    assert [line["path"] for line in lines(caplog)] == ["/v1/models"]

"""What operators ask: /v1/loads, /flush_cache, /health_generate, and /metrics only when wanted."""

from __future__ import annotations

import httpx
import pytest

from cp_shared_kv.engine.api import EngineRefusal
from cp_shared_kv.server import pages


def test_loads_are_those_of_server_info_in_logical_tokens(http):
    told = http.get("/v1/loads").json()
    usage = http.get("/server_info").json()["usage"]
    (load,) = told["loads"]
    assert load["num_running_reqs"] == usage["prefill_requests"] + usage["decode_requests"] == 7
    assert load["num_waiting_reqs"] == usage["queued_requests"] == 3
    assert load["num_used_tokens"] == usage["used_tokens"]
    assert load["max_total_num_tokens"] == 512
    assert load["token_usage"] == usage["token_usage"]
    assert told["dp_rank_count"] == 1
    assert told["aggregate"]["total_reqs"] == 10
    assert told["version"] == "0.0.test"


def test_without_an_engine_there_is_no_load(http, engine):
    engine.current_stats = None
    response = http.get("/v1/loads")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "unavailable"


def test_a_flush_tells_what_went(http):
    assert http.post("/flush_cache").json() == {"dropped_pages": 2, "dropped_tokens": 128}
    assert http.get("/flush_cache").status_code == 405


def test_a_flush_without_an_engine_is_unavailable(http, engine):
    engine.refusal = EngineRefusal("the engine has gone", kind="unavailable")
    assert http.post("/flush_cache").status_code == 503


def test_health_generate_takes_one_greedy_token(http, engine):
    assert http.get("/health_generate").json() == {"status": "ok"}
    (request,) = engine.requests
    assert (request.max_tokens, request.sampling.temperature) == (1, 0)
    assert engine.aborted == []


def test_health_generate_tells_why_there_was_none(http, engine):
    engine.refusal = EngineRefusal("rank 1 is gone", kind="unavailable")
    response = http.get("/health_generate")
    assert response.status_code == 503
    assert response.json() == {"status": "unavailable", "reason": "rank 1 is gone"}


def test_health_generate_does_not_wait_for_ever(http, engine, monkeypatch):
    monkeypatch.setattr(pages, "HEALTH_GENERATE_SECONDS", 0.1)
    engine.stall_after_tokens = 0
    response = http.get("/health_generate")
    assert response.status_code == 503
    assert "no token within 0.1 s" in response.json()["reason"]
    assert engine.aborted == [engine.requests[0].request_id]


@pytest.mark.parametrize("path", ["/health_generate", "/v1/loads"])
def test_probes_leave_the_latencies_alone(http, path):
    def counted() -> list[str]:
        lines = http.get("/metrics").text.splitlines()
        return [line for line in lines if "time_to_first_token_seconds_count" in line]

    before = counted()
    assert http.get(path).status_code == 200
    assert counted() == before


def test_metrics_are_off_unless_asked_for(own_server):
    server, _ = own_server()
    response = httpx.get(f"{server.url}/metrics")
    assert response.status_code == 404
    assert "--enable-metrics" in response.json()["error"]["message"]

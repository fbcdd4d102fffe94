"""Models, health, /server_info and /metrics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cp_shared_kv import telemetry
from cp_shared_kv.engine.api import EngineRefusal


def samples(http) -> Iterator[Sample]:
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    for family in text_string_to_metric_families(response.text):
        yield from family.samples


def figures(http) -> dict[str, float]:
    """Values by name and own labels: `name` or `name{cp_rank=0}`."""
    out: dict[str, float] = {}
    for sample in samples(http):
        labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
        own = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
        out[f"{sample.name}{{{own}}}" if own else sample.name] = sample.value
    return out


def test_the_openai_client_lists_the_model(client):
    (model,) = client.models.list().data
    assert model.id == "fake-model"
    assert model.max_model_len == 1024
    assert client.models.retrieve("fake-model").id == "fake-model"


def test_a_model_that_is_not_served_is_not_found(http):
    response = http.get("/v1/models/some/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


def test_every_figure_carries_the_models_name(http):
    assert {s.labels["model_name"] for s in samples(http)} == {"fake-model"}


def test_every_metric_of_the_catalogue_is_served_with_its_kind_and_labels(http):
    http.post("/v1/completions", json={"model": "fake-model", "prompt": "x"})
    families = {f.name: f for f in text_string_to_metric_families(http.get("/metrics").text)}
    for metric in telemetry.CATALOGUE:
        family = families.pop(metric.name.removesuffix("_total"))
        assert family.type == metric.kind
        assert family.documentation == metric.help
        assert family.samples, metric.name
        for sample in family.samples:
            assert set(sample.labels) - {"model_name", "le"} == set(metric.labels)
    assert not families, "served but not in the catalogue"


def test_capacity_and_use_are_logical_tokens(http):
    have = figures(http)
    assert have["sglang:max_total_num_tokens"] == 512
    assert have["sglang:num_pages"] * have["sglang:page_size"] == 512
    assert have["sglang:num_used_tokens"] == have["sglang:kv_used_tokens"] == 192
    assert have["sglang:token_usage"] == 192 / 512
    parts = ("num_used_tokens", "kv_available_tokens", "kv_evictable_tokens")
    assert sum(have[f"sglang:{part}"] for part in parts) == 512
    assert have["cpkv:physical_tokens_per_rank"] * have["cpkv:cp_size"] == 512


def test_figures_per_rank(http):
    have = figures(http)
    assert [have[f"cpkv:sent_pages_total{{cp_rank={r},dp_rank=0}}"] for r in range(4)] == [
        4,
        3,
        3,
        2,
    ]
    assert [have[f"cpkv:owner_free_pages{{cp_rank={r},dp_rank=0}}"] for r in range(4)] == [
        1,
        1,
        1,
        0,
    ]
    for rank, (cached, locked) in enumerate([(1, 0), (0, 1), (0, 1), (1, 1)]):
        assert have[f"cpkv:owner_cached_pages{{cp_rank={rank},dp_rank=0}}"] == cached
        assert have[f"cpkv:owner_locked_pages{{cp_rank={rank},dp_rank=0}}"] == locked
    assert have["sglang:kv_cache_memory_usage_gb{cp_rank=3}"] == 3 / 1024


@pytest.mark.parametrize(
    ("metric", "path"),
    [
        ("sglang:max_total_num_tokens", "max_total_num_tokens"),
        ("sglang:max_total_num_tokens", "capacity.logical_tokens"),
        ("sglang:num_pages", "capacity.logical_pages"),
        ("sglang:page_size", "page_size"),
        ("cpkv:physical_tokens_per_rank", "capacity.physical_tokens_per_rank"),
        ("cpkv:cp_size", "capacity.cp_size"),
        ("cpkv:longest_prompt_tokens", "capacity.longest_prompt_tokens"),
        ("cpkv:longest_prompt_tokens", "max_req_input_len"),
        ("cpkv:scratch_limit_bytes", "capacity.scratch_limit_bytes"),
        ("cpkv:decode_tokens", "capacity.decode_tokens"),
        ("sglang:num_used_tokens", "usage.used_tokens"),
        ("sglang:kv_available_tokens", "usage.available_tokens"),
        ("sglang:kv_evictable_tokens", "usage.evictable_tokens"),
        ("sglang:token_usage", "usage.token_usage"),
        ("sglang:cache_hit_rate", "usage.cache_hit_rate"),
        ("cpkv:decode_used_tokens", "usage.decode_used_tokens"),
        ("sglang:num_queue_reqs", "usage.queued_requests"),
        ("cpkv:prefill_reqs", "usage.prefill_requests"),
        ("cpkv:decode_reqs", "usage.decode_requests"),
        ("sglang:num_decode_prealloc_queue_reqs", "usage.decode_queued_requests"),
        ("sglang:prompt_tokens_total", "totals.prompt_tokens"),
        ("sglang:cached_tokens_total{cache_source=device}", "totals.cached_tokens"),
        ("sglang:generation_tokens_total", "totals.generated_tokens"),
        ("sglang:evicted_tokens_total", "totals.evicted_tokens"),
        ("sglang:num_transfer_failed_reqs_total", "totals.failed_transfers"),
        ("sglang:num_aborted_requests_total", "totals.requests.aborted"),
        ("cpkv:requests_total{outcome=finished}", "totals.requests.finished"),
        ("cpkv:sent_pages_total{cp_rank=2,dp_rank=0}", "ranks.2.sent_pages"),
        ("cpkv:sent_descriptors_total{cp_rank=2,dp_rank=0}", "ranks.2.sent_descriptors"),
        ("cpkv:sent_bytes_total{cp_rank=2,dp_rank=0}", "ranks.2.sent_bytes"),
        ("cpkv:read_bytes_total{cp_rank=2,dp_rank=0}", "ranks.2.read_bytes"),
        ("cpkv:owner_free_pages{cp_rank=3,dp_rank=0}", "ranks.3.free_pages"),
        ("cpkv:scratch_bytes{cp_rank=3,dp_rank=0}", "ranks.3.scratch_bytes"),
    ],
)
def test_server_info_and_metrics_agree(http, metric, path):
    value = http.get("/server_info").json()
    for step in path.split("."):
        value = value[int(step) if step.isdigit() else step]
    assert figures(http)[metric] == value


def test_server_info_has_the_settings_by_their_flags_names(http):
    info = http.get("/server_info").json()
    assert info["model_path"] == "/models/fake"
    assert info["served_model_name"] == "fake-model"
    assert http.get("/get_server_info").json() == info


def test_pages_outlive_the_engine(http, engine):
    engine.current_stats = None
    engine.health = (False, "gone")
    have = figures(http)
    assert have["cpkv:engine_up"] == 0
    assert have["sglang:max_total_num_tokens"] == 512
    assert "sglang:num_used_tokens" not in have
    assert http.get("/server_info").json()["usage"] is None
    engine.reset()
    assert figures(http)["cpkv:engine_up"] == 1


def test_latencies_are_counted_by_request_and_token(http, engine):
    engine.tokens_per_chunk = 3
    before = figures(http)
    http.post("/v1/completions", json={"model": "fake-model", "prompt": "x", "max_tokens": 10})
    after = figures(http)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("sglang:time_to_first_token_seconds_count") == 1
    assert grown("sglang:e2e_request_latency_seconds_count") == 1
    assert grown("sglang:inter_token_latency_seconds_count") == 10 - 3
    assert grown("sglang:inter_token_latency_seconds_bucket{le=+Inf}") == 10 - 3


def test_responses_are_counted_by_path_and_status_but_not_by_invented_paths(http):
    for _ in range(3):
        http.get("/invented/path")
    have = figures(http)
    assert have["cpkv:http_responses_total{path=other,status=404}"] >= 3
    assert not any("invented" in name for name in have)


def test_the_books_of_every_process_can_be_asked_for(http, engine):
    answer = http.get("/debug/invariants")
    assert answer.status_code == 200
    assert answer.json() == {"balanced": True, "problems": {"prefill-0": [], "decode-0": []}}
    engine.problems = {"prefill-0": ["page 7 has two owners"], "decode-0": []}
    answer = http.get("/debug/invariants")
    assert answer.status_code == 503
    assert answer.json()["problems"]["prefill-0"] == ["page 7 has two owners"]
    engine.refusal = EngineRefusal("the engine does not answer", kind="unavailable")
    assert http.get("/debug/invariants").json()["error"]["code"] == "unavailable"
    engine.reset()

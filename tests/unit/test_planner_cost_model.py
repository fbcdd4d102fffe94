"""The formulas that stand for a forward pass, and where their rates come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.memory.pool_sizes import PoolSizes
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.planner.capacity import pool_sizes
from cp_shared_kv.planner.cost_model import BatchSeconds, CostModel, Span, attended_keys
from cp_shared_kv.planner.gpus import GPUS
from cp_shared_kv.planner.model_catalogue import model_named
from cp_shared_kv.planner.model_flops import (
    attention_projections,
    experts,
    indexer_projections,
    linear_flops_per_token,
)
from cp_shared_kv.planner.rates import Rates
from cp_shared_kv.planner.weight_bytes import WeightBytes, WeightSplit

H200 = Rates.of_gpu(GPUS["h200"])
NO_WEIGHTS = WeightBytes(0, 0, 0)
K, M = 1 << 10, 1 << 20
RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def costs(
    model: ModelConfig | None = None,
    cp_size: int = 8,
    owners: int = 8,
    weights: WeightBytes = NO_WEIGHTS,
    sizes: PoolSizes | None = None,
) -> CostModel:
    model = model or model_named("deepseek-v3.2")
    sizes = sizes or pool_sizes(model, "bf16", 64)
    split = WeightSplit(cp_size)
    return CostModel(model, sizes, H200, weights, split, cp_size=cp_size, owners=owners)


def chunk(cp_size: int, prefix: int, **settings: Any) -> BatchSeconds:
    return costs(cp_size=cp_size, **settings).batch([Span(prefix, 8192)], prefix)


def test_work_of_a_token_of_deepseek_v3_2_in_one_layer() -> None:
    model = model_named("deepseek-v3.2")
    assert attention_projections(model) == pytest.approx(374.2e6, rel=1e-3)
    assert indexer_projections(model) == pytest.approx(27.9e6, rel=1e-3)
    assert experts(model) == pytest.approx(796.4e6, rel=1e-3)


def test_layers_without_an_indexer_or_experts_are_counted_as_such() -> None:
    full, shared = model_named("glm-5"), model_named("glm-5.2")
    saved = linear_flops_per_token(full) - linear_flops_per_token(shared)
    assert saved == pytest.approx(57 * indexer_projections(full))


@pytest.mark.parametrize(
    ("cp_size", "prefix", "index", "mla", "linear", "top_k"),
    [
        (2, 128 * K, 10.1, 4.3, 6.1, 1.7),
        (8, 128 * K, 2.5, 1.1, 1.5, 0.4),
        (2, M, 78.5, 4.3, 6.1, 12.9),
        (8, M, 19.6, 1.1, 1.5, 3.2),
    ],
)
def test_milliseconds_a_layer_of_8192_tokens_on_h200(
    cp_size: int, prefix: int, index: float, mla: float, linear: float, top_k: float
) -> None:
    found = chunk(cp_size, prefix)
    layer = [1000 * part / 61 for part in (found.index, found.mla, found.linear, found.top_k)]
    assert layer == pytest.approx([index, mla, linear, top_k], rel=0.007, abs=0.06)


@pytest.mark.parametrize(("prefix", "new"), [(0, 1), (0, 5), (3, 9), (7, 4), (8, 3), (100, 7)])
def test_attended_keys_are_those_of_each_token_up_to_top_k(prefix: int, new: int) -> None:
    seen = sum(min(8, prefix + token + 1) for token in range(new))
    assert attended_keys(prefix, new, topk=8) == seen


def test_few_tokens_wait_for_the_weights_that_they_touch() -> None:
    model = model_named("deepseek-v3.2")
    weights = WeightBytes(0, routed_expert_bytes=800 * 10**9, other_bytes=10 * 10**9)
    found = costs(model, weights=weights)
    one = found.batch([Span(0, 1)], 0).linear
    # One token touches 8 of 256 experts of each layer, of which a rank has an eighth.
    assert one == pytest.approx((10e9 + 100e9 * 8 / 256) / H200.hbm_bytes)
    many = found.batch([Span(0, 500)], 0).linear
    assert many == pytest.approx(110e9 / H200.hbm_bytes, rel=1e-3)
    whole_chunk = found.batch([Span(0, 65_536)], 0).linear
    assert whole_chunk == chunk(8, 0).linear * 8


def test_a_shared_pool_pays_for_reads_and_a_replicated_one_does_not() -> None:
    shared, replicated = chunk(8, 128 * K), chunk(8, 128 * K, owners=1)
    token_bytes = 61 * (1152 + 132)
    assert shared.read == pytest.approx(7 / 8 * 128 * K * token_bytes / H200.link_bytes)
    assert replicated.read == 0
    assert shared.total - replicated.total == pytest.approx(shared.read)


def test_a_prefix_that_two_requests_share_is_read_once() -> None:
    model = costs()
    spans = [Span(64 * K, 100), Span(64 * K, 100)]
    assert model.batch(spans, 64 * K).read == pytest.approx(model.batch(spans, 128 * K).read / 2)


def test_a_batch_costs_what_its_requests_do() -> None:
    model = costs()
    one, other = Span(1000, 500), Span(90_000, 3000)
    both = model.batch([one, other], 91_000)
    alone = [model.batch([span], span.prefix) for span in (one, other)]
    for part in ("index", "top_k", "mla", "read", "exchange", "linear"):
        total = sum(getattr(seconds, part) for seconds in alone)
        assert getattr(both, part) == pytest.approx(total), part


def test_owners_send_their_shares_at_once() -> None:
    page = 64 * 61 * (1152 + 132)
    assert costs(owners=8).transfer_seconds(80) == pytest.approx(10 * page / H200.network_bytes)
    assert costs(owners=1).transfer_seconds(80) == pytest.approx(80 * page / H200.network_bytes)


# Rates -------------------------------------------------------------------------------------------


def test_rates_of_other_gpus_are_the_same_part_of_their_peaks() -> None:
    h20 = Rates.of_gpu(GPUS["h20"])
    assert h20.index_flops / H200.index_flops == pytest.approx(296 / 1979)
    assert h20.mla_flops / H200.mla_flops == pytest.approx(148 / 989)
    assert h20.hbm_bytes / H200.hbm_bytes == pytest.approx(4.0 / 4.8)


def test_the_links_of_a_recorded_measurement_replace_the_assumed_ones() -> None:
    (record, *_) = sorted(RESULTS.glob("gpu_full_prefix-*.json"))
    found = H200.with_results(record)
    assert 300e9 < found.link_bytes < 450e9
    assert record.name in found.source
    assert found.index_flops == H200.index_flops


def test_the_longest_prefix_of_a_record_counts_and_its_fastest_read(tmp_path: Path) -> None:
    record = {
        "benchmark": "gpu_full_prefix",
        "config": {"remote_bytes": {"bf16, 8 K": 1000, "bf16, 1024 K": 8000}},
        "samples_seconds": {
            "bf16, 8 K: pull": [1.0],
            "bf16, 1024 K: pull": [4.0, 5.0, 40.0],
            "bf16, 1024 K: push": [2.0, 4.0, 9.0],
            "bf16, 1024 K: pack and all-gather": [1.0],
        },
    }
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    assert H200.with_results(path).link_bytes == 2000


def test_rates_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"rates": {"linear_flops": 7e14, "network_bytes": 2e10}}')
    found = H200.with_results(path)
    assert (found.linear_flops, found.network_bytes) == (7e14, 2e10)
    assert found.link_bytes == H200.link_bytes


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"rates": {"speed": 1}}',
        '{"rates": {"hbm_bytes": 0}}',
        '{"rates": {"hbm_bytes": true}}',
        '{"benchmark": "gpu_full_prefix"}',
        '{"benchmark": "gpu_full_prefix", "config": {"remote_bytes": {}}, "samples_seconds": {}}',
    ],
)
def test_a_file_without_rates_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--gpu-results"):
        H200.with_results(path)

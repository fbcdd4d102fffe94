"""What `cpkv plan` says fits: the check value, the arrangements, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cp_shared_kv.errors import CapacityError, CheckpointError, ConfigError
from cp_shared_kv.planner.capacity import (
    ArrangementPlan,
    Plan,
    PlanRequest,
    layer_split_page_bytes,
    make_plan,
    pool_sizes,
)
from cp_shared_kv.planner.gpus import GIB, GPUS, gpu_named
from cp_shared_kv.planner.model_catalogue import BUILT_IN, model_named
from cp_shared_kv.planner.plan_table import notes
from cp_shared_kv.planner.weight_bytes import WeightSplit, weight_bytes


def request(model: str = "glm-5", cp_size: int = 8, **changes: Any) -> PlanRequest:
    config = model_named(model)
    values: dict[str, Any] = {
        "model": config,
        "weights": weight_bytes(config),
        "split": WeightSplit(cp_size),
        "cp_size": cp_size,
    }
    if "kv_budget_bytes" not in changes:
        values["memory_bytes"] = gpu_named("h200").memory_bytes
    return PlanRequest(**(values | changes))


def by_name(plan: Plan) -> dict[str, ArrangementPlan]:
    return {arrangement.arrangement: arrangement for arrangement in plan.arrangements}


# Sizes -------------------------------------------------------------------------------------------


def test_the_check_value_of_78_layers_in_bf16() -> None:
    plan = make_plan(request(kv_budget_bytes=int(22.145 * GIB)))
    assert plan.page_bytes == 100_152 * 64
    found = by_name(plan)
    assert found["replicated"].physical_tokens == found["shared"].physical_tokens == 237_312
    assert found["replicated"].logical_tokens == 237_312
    assert found["shared"].logical_tokens == 1_898_496


@pytest.mark.parametrize(
    ("model", "billions", "index_layers", "context"),
    [
        ("deepseek-v3.2", 671.9, 61, 163_840),
        ("glm-5", 743.9, 78, 202_752),
        ("glm-5.2", 743.4, 21, 1_048_576),
    ],
)
def test_the_built_in_models_have_the_sizes_that_they_are_known_by(
    model: str, billions: float, index_layers: int, context: int
) -> None:
    config = model_named(model)
    assert weight_bytes(config).parameters / 1e9 == pytest.approx(billions, abs=0.1)
    assert len(config.index_layers) == index_layers
    assert config.context_length == context
    assert config.block_fp8


def test_the_layers_of_glm_5_2_that_have_an_indexer() -> None:
    assert model_named("glm-5.2").index_layers == (0, 1, *range(2, 78, 4))


@pytest.mark.parametrize(
    ("model", "kv_cache_dtype", "bytes_per_token"),
    [
        ("deepseek-v3.2", "bf16", 61 * (1152 + 132)),
        ("deepseek-v3.2", "fp8_e4m3", 61 * (656 + 132)),
        ("glm-5.2", "fp8_e4m3", 78 * 656 + 21 * 132),
        ("glm-5.2", "fp32", 78 * 2304 + 21 * 512),
    ],
)
def test_bytes_of_a_token(model: str, kv_cache_dtype: Any, bytes_per_token: int) -> None:
    assert pool_sizes(model_named(model), kv_cache_dtype, 64).bytes_per_token == bytes_per_token


def test_fp8_weights_take_a_byte_each_and_their_scales() -> None:
    config = model_named("glm-5")
    fp8, bf16 = weight_bytes(config, "fp8"), weight_bytes(config, "bf16")
    assert bf16.routed_expert_bytes + bf16.other_bytes == 2 * bf16.parameters
    assert fp8.routed_expert_bytes == bf16.routed_expert_bytes // 2 * (1 + 4 / 128**2)
    assert fp8.other_bytes > bf16.other_bytes / 2  # embeddings, router and head weights stay
    assert weight_bytes(config) == fp8


def test_experts_are_spread_and_the_rest_is_whole_on_every_rank() -> None:
    weights = weight_bytes(model_named("glm-5"))
    assert weights.of_rank(WeightSplit(8)) == weights.routed_expert_bytes // 8 + weights.other_bytes
    halved = weights.of_rank(WeightSplit(8, dense_ranks=2))
    assert halved == weights.routed_expert_bytes // 8 + -(-weights.other_bytes // 2)


@pytest.mark.parametrize("model", BUILT_IN)
@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
def test_weights_pool_and_scratch_stay_within_what_they_may_take(model: str, dtype: Any) -> None:
    plan = make_plan(request(model, kv_cache_dtype=dtype))
    for found in plan.arrangements:
        taken = plan.weight_bytes + found.pool_bytes + found.scratch_bytes
        assert plan.usable_bytes is not None
        assert taken <= plan.usable_bytes
        # Not a page more would have fitted, with the scratch that a page can cost.
        assert taken + 3 * found.kv_bytes_per_token * 64 > plan.usable_bytes


def test_sharing_gives_what_the_scratch_for_long_prefixes_leaves_of_n_times() -> None:
    found = by_name(make_plan(request("glm-5.2")))
    gain = found["shared"].logical_tokens / found["replicated"].logical_tokens
    assert 7.0 < gain < 8.0
    short = by_name(make_plan(request("glm-5.2", context_length=16_384)))
    assert short["shared"].logical_tokens / short["replicated"].logical_tokens > 7.9
    assert found["shared"].longest_prompt_tokens == 1_048_575
    assert found["replicated"].longest_prompt_tokens == found["replicated"].logical_tokens


def test_the_layer_split_keeps_a_layer_of_its_peers_as_sglang_does() -> None:
    # 78 layers on 8 ranks: 10 of its own on the busiest, and one that is broadcast: the 7.09 times
    # of https://github.com/sgl-project/sglang/pull/29930.
    sizes = pool_sizes(model_named("glm-5"), "bf16", 64)
    assert layer_split_page_bytes(sizes, 8) == 11 * (1152 + 132) * 64
    budget = request(kv_budget_bytes=int(22.145 * GIB))
    found = by_name(make_plan(budget))
    gain = found["layer split"].logical_tokens / found["replicated"].logical_tokens
    assert gain == pytest.approx(3_247_296 / 457_920, rel=2e-3)


def test_the_layer_split_is_bound_by_the_block_with_most_index_layers() -> None:
    sizes = pool_sizes(model_named("glm-5.2"), "bf16", 64)
    # Layers 0 to 9 have the indexers 0, 1, 2 and 6; no later block of ten has as many.
    assert layer_split_page_bytes(sizes, 8) == (10 * 1152 + 4 * 132 + 1152 + 132) * 64


def test_prompts_at_once_are_counted_in_whole_pages() -> None:
    plan = make_plan(request(kv_budget_bytes=int(22.145 * GIB), prompt_lengths=(65, 1 << 18)))
    shared = by_name(plan)["shared"]
    assert shared.concurrent_requests == {65: 237_312 // 64 * 8 // 2, 1 << 18: 0}


def test_a_single_rank_has_nothing_to_share() -> None:
    plan = make_plan(request(cp_size=1, kv_budget_bytes=GIB))
    assert [found.arrangement for found in plan.arrangements] == ["replicated"]
    assert plan.arrangements[0].scratch_bytes == 0


def test_a_note_says_that_scores_do_not_fit_and_what_limits_prompts() -> None:
    assert len(notes(make_plan(request("glm-5.2")))) == 1  # whose split of weights it is
    tight = make_plan(request("glm-5.2", memory_fraction=0.98, chunk_tokens=32_768))
    assert "Indexer scores" in notes(tight)[1]
    pool_bound = make_plan(request("glm-5.2", kv_budget_bytes=2 * GIB))
    assert "The pool, not the model" in notes(pool_bound)[0]


# Models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_directory", [True, False])
def test_a_model_by_its_config_json(tmp_path: Path, as_directory: bool) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BUILT_IN["glm-5.2"]))
    assert model_named(str(tmp_path if as_directory else file)) == model_named("GLM-5.2")


@pytest.mark.parametrize("content", ["[1]", "{", '{"model_type": "llama"}'])
def test_a_config_json_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises((CheckpointError, ConfigError), match=r"config\.json"):
        model_named(str(tmp_path))


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match=r"deepseek-v3\.2, glm-5, glm-5\.2"):
        model_named("gpt-oss")


# Refusals ----------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_refused_with_what_to_change() -> None:
    with pytest.raises(CapacityError, match="--expert-parallel-size"):
        make_plan(request("deepseek-v3.2", memory_bytes=GPUS["h20"].memory_bytes))


def test_a_budget_without_a_page_is_refused() -> None:
    with pytest.raises(CapacityError, match="no stripe of pages"):
        make_plan(request(kv_budget_bytes=1 << 20))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"memory_bytes": None}, "--kv-budget-gib"),
        ({"memory_bytes": GIB, "kv_budget_bytes": GIB}, "--kv-budget-gib"),
        ({"memory_fraction": 0.0}, "--mem-fraction-static"),
        ({"memory_fraction": 1.5}, "--mem-fraction-static"),
        ({"context_length": 1 << 20}, "--context-length"),
        ({"prompt_lengths": (0,)}, "--lengths"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        request(**changes)


@pytest.mark.parametrize("ranks", [{"expert_ranks": 0}, {"expert_ranks": 8, "dense_ranks": 0}])
def test_weights_are_spread_over_one_rank_at_least(ranks: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="parallel-size is out of range"):
        WeightSplit(**ranks)


def test_what_the_engine_refuses_is_refused_here() -> None:
    with pytest.raises(ConfigError, match="--page-size"):
        make_plan(request(page_size=48))
    with pytest.raises(ConfigError, match="--attention-context-parallel-size"):
        make_plan(request(cp_size=1000))


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    assert gpu_named("H200") is GPUS["h200"]
    with pytest.raises(ConfigError, match="h20-3e"):
        gpu_named("mi300x")

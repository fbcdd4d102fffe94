"""What of a config.json is accepted, and how the rest is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cp_shared_kv.demo_model.shapes import GlmModelShape, ModelShape
from cp_shared_kv.errors import CheckpointError, ConfigError
from cp_shared_kv.model.config import ModelConfig


def config(**changes: Any) -> dict[str, Any]:
    return {**ModelShape().config(), **changes}


def without(*names: str, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in config(**changes).items() if name not in names}


def test_the_older_spelling_of_rope_means_the_same() -> None:
    newer = config()
    scaling = dict(newer["rope_parameters"])
    theta = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    older = without("rope_parameters", rope_scaling=scaling, rope_theta=theta)
    assert ModelConfig.from_dict(older) == ModelConfig.from_dict(newer)


def test_yarn_scales_the_softmax_as_deepseek_publishes_it() -> None:
    rope = {**config()["rope_parameters"], "factor": 40.0}
    parsed = ModelConfig.from_dict(
        config(rope_parameters=rope, qk_nope_head_dim=128, qk_rope_head_dim=64, index_head_dim=128)
    )
    assert parsed.softmax_scale == pytest.approx(192**-0.5 * 1.8739, rel=1e-4)
    assert parsed.rope.rotation_scale == 1.0


def test_plain_rope_scales_nothing() -> None:
    parsed = ModelConfig.from_dict(without("rope_parameters", rope_theta=1e6))
    assert parsed.rope.yarn is None
    assert parsed.rope.theta == 1e6
    assert parsed.softmax_scale == (32 + 16) ** -0.5


def test_layer_kinds_by_list_or_by_count() -> None:
    by_count = ModelConfig.from_dict(config(num_hidden_layers=3, first_k_dense_replace=2))
    kinds = ["dense", "dense", "sparse"]
    by_list = ModelConfig.from_dict(config(num_hidden_layers=3, mlp_layer_types=kinds))
    assert by_count.sparse_mlp_layers == by_list.sparse_mlp_layers == (False, False, True)


def test_every_layer_of_deepseek_stores_index_keys() -> None:
    assert ModelConfig.from_dict(config(num_hidden_layers=3)).index_layers == (0, 1, 2)


def test_layers_of_glm_that_share_a_selection_store_no_index_keys() -> None:
    shape = GlmModelShape(num_hidden_layers=5, indexer={"index_topk_pattern": "FSSFS"})
    assert ModelConfig.from_dict(shape.config()).index_layers == (0, 3)


def test_the_two_architectures_rotate_index_keys_in_their_own_pairing() -> None:
    assert ModelConfig.from_dict(config()).index_rope_style == "half-split"
    glm = GlmModelShape().config()
    assert ModelConfig.from_dict(glm).index_rope_style == "interleaved"
    for parts, wrong in ((config(), True), (glm, False)):
        with pytest.raises(ConfigError, match="indexer_rope_interleave"):
            ModelConfig.from_dict({**parts, "indexer_rope_interleave": wrong})


@pytest.mark.parametrize(("shape", "default"), [(ModelShape(), 1e-6), (GlmModelShape(), 1e-5)])
def test_the_epsilon_is_the_configs_else_the_architectures(
    shape: ModelShape, default: float
) -> None:
    written = shape.config()
    assert ModelConfig.from_dict({**written, "rms_norm_eps": 3e-5}).rms_norm_eps == 3e-5
    del written["rms_norm_eps"]
    assert ModelConfig.from_dict(written).rms_norm_eps == default


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "glm5_next"}, "glm5_next"),
        ({"model_type": ["deepseek_v32"]}, "model_type"),
        ({"model_type": "llama"}, "llama"),
        ({"model_type": None}, "None"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"scoring_func": "softmax"}, "softmax"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_interleave": False}, "rope_interleave"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "128"}, "'128'"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"index_topk": True}, "index_topk"),
        ({"index_head_dim": 8}, "index_head_dim"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 8}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"mlp_layer_types": ["dense", ["sparse"]]}, "mlp_layer_types"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"routed_scaling_factor": -1}, "routed_scaling_factor"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"eos_token_id": 257}, "eos_token_id"),
        ({"eos_token_id": [2, 257]}, "eos_token_id"),
        ({"vocab_size": 1, "eos_token_id": 1}, "eos_token_id"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"eos_token_id": 2**64}, "eos_token_id"),
    ],
)
def test_what_cannot_run_is_refused_by_name_with_what_is_allowed(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        ModelConfig.from_dict(config(**changes))
    assert "allowed: " in str(refused.value)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "most"),
    [("num_hidden_layers", 4096), ("n_routed_experts", 4096), ("vocab_size", 2**31 - 1)],
)
def test_counts_have_an_upper_bound_that_is_told(name: str, most: int) -> None:
    assert ModelConfig.from_dict(config(**{name: most}))
    with pytest.raises(ConfigError, match=f"{name}: 1000000000000; allowed: .*at most {most}$"):
        ModelConfig.from_dict(config(**{name: 10**12}))


def test_a_value_that_is_long_is_told_in_part() -> None:
    with pytest.raises(ConfigError, match=r"eos_token_id: .* \.\.\. \(.* characters\)") as told:
        ModelConfig.from_dict(config(eos_token_id=[*range(100_000), "end"]))
    assert len(str(told.value)) < 400


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("rope_type", "longrope"),
        ("factor", None),
        ("factor", "40"),
        ("rope_theta", 1.0),
        ("original_max_position_embeddings", 0),
        ("partial_rotary_factor", 0.5),
        ("attention_factor", 1.2),
        ("truncate", False),
    ],
)
def test_a_rope_that_cannot_run_is_refused(setting: str, value: object) -> None:
    rope = {**config()["rope_parameters"], setting: value}
    with pytest.raises(ConfigError, match=setting):
        ModelConfig.from_dict(config(rope_parameters=rope))


def test_rope_parameters_that_are_no_object_are_refused() -> None:
    with pytest.raises(ConfigError, match="rope_parameters"):
        ModelConfig.from_dict(config(rope_parameters=[1]))


def write(directory: Path, name: str, content: object) -> None:
    (directory / name).write_text(json.dumps(content))


def test_generation_config_has_the_last_word_on_end_tokens(tmp_path: Path) -> None:
    write(tmp_path, "config.json", config(eos_token_id=1))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (1,)
    write(tmp_path, "generation_config.json", {"eos_token_id": [256, 2]})
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (256, 2)
    write(tmp_path, "generation_config.json", {"eos_token_id": [1.0]})
    with pytest.raises(ConfigError, match=r"^generation_config\.json: eos_token_id"):
        ModelConfig.from_directory(tmp_path)
    for unusable in ("end", 257):
        write(tmp_path, "generation_config.json", {"eos_token_id": unusable})
        with pytest.raises(ConfigError, match="eos_token_id"):
            ModelConfig.from_directory(tmp_path)


def test_the_context_length_is_the_configs(tmp_path: Path) -> None:
    write(tmp_path, "config.json", config(max_position_embeddings=16384))
    assert ModelConfig.from_directory(tmp_path).context_length == 16384


def test_a_missing_directory_or_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere.*\*\.safetensors$"):
        ModelConfig.from_directory(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json .*to change it: give --model-path"):
        ModelConfig.from_directory(tmp_path)


def test_the_name_of_a_hub_is_told_how_to_become_a_directory() -> None:
    with pytest.raises(CheckpointError, match=r"DeepSeek-V3\.2.*not downloaded.*hf download NAME"):
        ModelConfig.from_directory("deepseek-ai/DeepSeek-V3.2")


@pytest.mark.parametrize("content", ["{", "[]", "", "[" * 100_000])
def test_a_broken_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_config_that_is_a_pipe_or_a_device_is_refused_and_not_waited_for(
    tmp_path: Path, file: str
) -> None:
    write(tmp_path, "config.json", config())
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    with pytest.raises(CheckpointError, match=f"{file} is no regular file.*allowed: "):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / file).unlink()
    (tmp_path / file).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=f"{file} is no regular file"):
        ModelConfig.from_directory(tmp_path)

"""Block-fp8 checkpoints: what is dequantised, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cp_shared_kv.demo_model.block_fp8 import BLOCK_FP8_CONFIG, block_fp8, quantised
from cp_shared_kv.demo_model.shapes import GlmModelShape, ModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.errors import CheckpointError, ConfigError
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.fp8_weights import dequantised, is_block_fp8, scale_shape
from cp_shared_kv.model.weights import ModelWeights, load_weights

# 192 rows of q_b_proj and 160 of kv_a_proj: two blocks each, the second cut.
SHAPE = GlmModelShape(kv_lora_rank=144, indexer={"index_topk_pattern": "FS"}, block_fp8=True)
WEIGHT = "model.layers.0.self_attn.q_b_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def one_by_one(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Value times the scale of its block, without any of the arithmetic that is tested."""
    wide = weight.float()
    for row in range(wide.shape[0]):
        for block, start in enumerate(range(0, wide.shape[1], 128)):
            wide[row, start : start + 128] *= scale[row // 128, block]
    return wide


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 1), (129, 127), (576, 200)])
def test_every_value_is_multiplied_by_the_scale_of_its_block(shape: tuple[int, int]) -> None:
    blocks = scale_shape(shape)
    assert blocks == (-(-shape[0] // 128), -(-shape[1] // 128))
    weight = drawn(*shape).to(torch.float8_e4m3fn)
    scale = drawn(*blocks)
    wide = dequantised(weight, scale, torch.float32)
    assert torch.equal(wide, one_by_one(weight, scale))
    assert torch.equal(dequantised(weight, scale, torch.bfloat16), wide.bfloat16())


def test_kv_a_proj_of_the_production_models_has_five_rows_of_scales() -> None:
    assert scale_shape((576, 7168)) == (5, 56)


def test_quantising_keeps_three_bits_of_each_value() -> None:
    weight = drawn(200, 300)
    weight[128:, :128] *= 1e-3  # a block of its own size, so with a scale of its own
    found = dequantised(*quantised(weight), torch.float32)
    assert (found - weight).norm() < 0.05 * weight.norm()
    assert (found - weight)[128:, :128].norm() < 0.05 * weight[128:, :128].norm()


@pytest.mark.parametrize(
    "settings",
    [
        BLOCK_FP8_CONFIG,
        {**BLOCK_FP8_CONFIG, "scale_fmt": "ue8m0", "modules_to_not_convert": ["lm_head"]},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ],
)
def test_the_production_checkpoints_settings_are_taken(settings: dict[str, Any]) -> None:
    assert is_block_fp8({"quantization_config": settings})


def test_no_quantisation_is_none() -> None:
    assert not any(is_block_fp8(c) for c in ({}, {"quantization_config": None}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quant_method": "awq"}, "quant_method"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": None}, "quant_method"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"weight_block_size": [1, 32]}, r"\[1, 32\]"),
        ({"weight_block_size": 128}, "weight_block_size"),
        ({"fmt": "e5m2"}, "e5m2"),
        ({"activation_scheme": "static"}, "static"),
    ],
)
def test_other_quantisations_are_refused_with_what_is_allowed(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        is_block_fp8({"quantization_config": {**BLOCK_FP8_CONFIG, **changes}})
    assert "block fp8" in str(refused.value)
    assert "dequantise the checkpoint" in str(refused.value)


def test_a_quantisation_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization_config"):
        is_block_fp8({"quantization_config": "fp8"})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_tiny_checkpoint(tmp_path / "model", SHAPE, seed=0)
    return tmp_path / "model"


def load(directory: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(directory, ModelConfig.from_directory(directory), dtype)


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)


def all_tensors(part: Any) -> list[torch.Tensor]:
    """Every tensor of loaded weights, in order."""
    if isinstance(part, torch.Tensor):
        return [part]
    parts = part if isinstance(part, tuple) else list(vars(part).values()) if part else []
    return [tensor for one in parts for tensor in all_tensors(one)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_fp8_checkpoint_loads_as_its_dequantised_copy_does(
    checkpoint: Path, dtype: torch.dtype
) -> None:
    found = all_tensors(load(checkpoint, dtype))
    stored = load_file(checkpoint / "model.safetensors")
    fp8 = [name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn]
    assert WEIGHT in fp8
    assert len(fp8) > 40
    for name in fp8:
        stored[name] = one_by_one(stored[name], stored.pop(f"{name}_scale_inv"))
    save_file(stored, checkpoint / "model.safetensors")
    expected = all_tensors(load(checkpoint, dtype))
    assert len(found) == len(expected) > 20
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_only_what_production_checkpoints_quantise_is_fp8(checkpoint: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    kept = {name for name in stored if f"{name}_scale_inv" not in stored}
    for part in ("norm", "embed_tokens", "lm_head", "mlp.gate.", "weights_proj", "_scale_inv"):
        assert any(part in name for name in kept), part
        assert not any(part in name for name in stored if name not in kept), part
    assert {tensor.dtype for name, tensor in stored.items() if name in kept} == {torch.float32}


def test_loaded_fp8_weights_outlive_their_file(checkpoint: Path) -> None:
    q_b_proj = load(checkpoint).layers[0].attention.q_b_proj
    before = q_b_proj.clone()
    path = checkpoint / "model.safetensors"
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(q_b_proj, before)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({SCALE: None}, [f"lacks 1 tensor(s), the first {SCALE}", "[2, 1]"]),
        ({SCALE: torch.ones(1, 1)}, [SCALE, "[1, 1]", "[2, 1]"]),
        ({SCALE: torch.ones(2, 1).bfloat16()}, [SCALE, "BF16", "allowed: F32"]),
        ({WEIGHT: torch.ones(192, 64)}, ["does not use", SCALE]),
        ({WEIGHT: torch.ones(192, 64).to(torch.float8_e5m2)}, [WEIGHT, "F8_E5M2", "F8_E4M3"]),
        (
            {"model.norm.weight": torch.ones(128).to(torch.float8_e4m3fn)},
            ["model.norm.weight", "F8_E4M3", "allowed: F32, BF16, F16"],
        ),
    ],
)
def test_a_weight_and_its_scales_must_belong_together(
    checkpoint: Path, changes: dict[str, torch.Tensor | None], named: list[str]
) -> None:
    rewrite(checkpoint, **changes)
    with pytest.raises(CheckpointError) as refused:
        load(checkpoint)
    for part in named:
        assert part in str(refused.value)


def test_fp8_weights_need_a_config_that_says_so(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    del config["quantization_config"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        load(checkpoint)


@pytest.mark.parametrize("shape", [ModelShape(), SHAPE])
def test_a_prediction_layer_in_fp8_is_skipped_with_its_scales(
    tmp_path: Path, shape: ModelShape
) -> None:
    make_tiny_checkpoint(tmp_path / "model", shape, seed=0)
    before = all_tensors(load(tmp_path / "model"))
    layer = f"model.layers.{shape.num_hidden_layers}"
    names = ("eh_proj", "self_attn.indexer.wk", "self_attn.q_b_proj", "mlp.experts.0.up_proj")
    extra = block_fp8({f"{layer}.{name}.weight": drawn(200, 130) for name in names})
    for name in ("enorm", "hnorm", "shared_head.norm", "shared_head.head", "embed_tokens"):
        extra[f"{layer}.{name}.weight"] = drawn(64)
    assert sum(name.endswith("_scale_inv") for name in extra) == len(names)
    rewrite(tmp_path / "model", **extra)
    with pytest.raises(CheckpointError, match=rf"{layer}\."):  # the config says there is none
        load(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    after = all_tensors(load(tmp_path / "model"))
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))

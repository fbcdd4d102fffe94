"""From flags and a checkpoint's config to what is computed in and what pages store."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.model_spec import ModelDescription, describe_model, pool_spec
from cp_shared_kv.errors import CheckpointError, ConfigError
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.model.config import ModelConfig

WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


def described(directory: Path, flags: dict[str, Any], **config: Any) -> ModelDescription:
    """The description of a model directory that has a config and no weights."""
    written = {**ModelShape().config(), **config}
    (directory / "config.json").write_text(
        json.dumps({name: value for name, value in written.items() if value != "absent"})
    )
    return describe_model(EngineConfig(model_path=directory, **flags))


def formats(description: ModelDescription) -> tuple[str, str]:
    spec = description.pool_spec
    return spec.latent.name, spec.index.name


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.bfloat16),
        ({"dtype": "absent", "torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "float16"}, torch.bfloat16),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, torch.float32),
        ({"dtype": "absent"}, torch.float32),
        ({"dtype": "float64"}, torch.float32),
    ],
)
def test_auto_computes_in_the_checkpoints_type(
    tmp_path: Path, config: dict[str, Any], expected: torch.dtype
) -> None:
    assert described(tmp_path, {}, **config).compute_dtype == expected


@pytest.mark.parametrize("of_checkpoint", ["float32", "bfloat16"])
def test_a_chosen_type_is_computed_in_whatever_the_checkpoints(
    tmp_path: Path, of_checkpoint: str
) -> None:
    for name, dtype in {"float32": torch.float32, "bfloat16": torch.bfloat16}.items():
        description = described(tmp_path, {"dtype": name}, dtype=of_checkpoint)
        assert description.compute_dtype == dtype


def test_a_checkpoint_type_that_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: dtype: \{'text'.*such as bfloat16"):
        described(tmp_path, {}, dtype={"text": "bfloat16"})


@pytest.mark.parametrize(
    ("chosen", "computed_in", "expected"),
    [
        ("auto", "float32", ("fp32", "fp32")),
        ("auto", "bfloat16", ("bf16", "fp8_scaled")),
        ("fp32", "bfloat16", ("fp32", "fp32")),
        ("bf16", "float32", ("bf16", "fp8_scaled")),
        ("fp8_e4m3", "float32", ("fp8_ds_mla", "fp8_scaled")),
        ("fp8_e4m3", "bfloat16", ("fp8_ds_mla", "fp8_scaled")),
    ],
)
def test_formats_follow_from_the_flag_and_from_what_is_computed_in(
    tmp_path: Path, chosen: str, computed_in: str, expected: tuple[str, str]
) -> None:
    flags = {"kv_cache_dtype": chosen, "dtype": computed_in}
    description = described(tmp_path, flags, **WIDE)
    assert formats(description) == expected
    layout = description.page_layout
    assert layout.latent_format.startswith(f"latent:{expected[0]} ")
    assert layout.index_format.startswith(f"index:{expected[1]} ")


@pytest.mark.parametrize("index_head_dim", [64, 256])
def test_index_k_that_has_no_fp8_layout_is_kept_in_bf16(
    tmp_path: Path, index_head_dim: int
) -> None:
    widths = {**WIDE, "index_head_dim": index_head_dim}
    description = described(tmp_path, {"kv_cache_dtype": "bf16"}, **widths)
    assert formats(description) == ("bf16", "bf16")


@pytest.mark.parametrize(
    ("widths", "named"),
    [
        ({"kv_lora_rank": 192}, "kv_lora_rank for the page format fp8_ds_mla: 192"),
        ({"index_head_dim": 64}, "index_head_dim for the page format fp8_scaled: 64"),
    ],
)
def test_fp8_pages_of_a_model_of_other_widths_are_refused(
    tmp_path: Path, widths: dict[str, int], named: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        described(tmp_path, {"kv_cache_dtype": "fp8_e4m3"}, **{**WIDE, **widths})
    assert named in str(refused.value)
    assert "allowed: " in str(refused.value)
    assert "use bf16 or fp32" in str(refused.value)


@pytest.mark.parametrize(
    ("chosen", "bytes_per_token"),
    [
        ("fp32", 78 * (2304 + 512)),
        ("bf16", 78 * (1152 + 132)),
        ("fp8_e4m3", 78 * (656 + 132)),
    ],
)
def test_a_token_of_a_production_model_has_the_bytes_of_the_design(
    chosen: Any, bytes_per_token: int
) -> None:
    shape = ModelShape(**WIDE, num_hidden_layers=78)
    spec = pool_spec(ModelConfig.from_dict(shape.config()), 64, chosen, torch.float32)
    assert spec.bytes_per_token == bytes_per_token


def test_the_capacity_of_the_design_follows_from_the_bf16_formats() -> None:
    shape = ModelShape(**WIDE, num_hidden_layers=78)
    spec = pool_spec(ModelConfig.from_dict(shape.config()), 64, "bf16", torch.bfloat16)
    capacity = KVCapacity.from_budget(int(22.145 * 2**30), spec.bytes_per_page, 64, 8)
    assert (capacity.physical_tokens, capacity.logical_tokens) == (237_312, 1_898_496)
    assert spec.pool_bytes(capacity.physical_pages) == 64 * 100_152 * (237_312 // 64 + 1)


def test_scratch_for_less_than_a_token_may_select_is_refused(tmp_path: Path) -> None:
    flags = {
        "attention_context_parallel_size": 2,
        "enable_nsa_prefill_context_parallel": True,
        "enable_nsa_prefill_cp_shared_kv": True,
        "kv_read": "sparse",
    }
    with pytest.raises(ConfigError, match=r"may select: 1500; allowed: at least 2048 \(index_topk"):
        described(tmp_path, {**flags, "kv_scratch_tokens": 1500}, index_topk=2048)
    described(tmp_path, {**flags, "kv_scratch_tokens": 2048}, index_topk=2048)


@pytest.mark.timeout(20)
def test_weights_that_are_a_pipe_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "extra.safetensors")
    with pytest.raises(CheckpointError, match=r"extra\.safetensors is no regular file"):
        described(tmp_path, {})

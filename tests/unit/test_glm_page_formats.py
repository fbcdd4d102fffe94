"""What GLM-5.2 stores of a token: index K in 21 of 78 layers, in its own rope pairing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cp_shared_kv.demo_model.shapes import GlmModelShape, ModelShape
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.model_spec import describe_model
from cp_shared_kv.memory.pool import KVPoolSpec

GLM_5_2 = GlmModelShape(
    num_hidden_layers=78,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    index_head_dim=128,
    indexer={"index_topk_freq": 4, "index_skip_topk_offset": 3},
)


def pool_spec(directory: Path, shape: ModelShape, **flags: Any) -> KVPoolSpec:
    (directory / "config.json").write_text(json.dumps(shape.config()))
    return describe_model(EngineConfig(model_path=directory, **flags)).pool_spec


@pytest.mark.parametrize(
    ("kv_cache_dtype", "bytes_per_token"),
    [
        ("fp8_e4m3", 78 * 656 + 21 * 132),
        ("bf16", 78 * 1152 + 21 * 132),
        ("fp32", 78 * 2304 + 21 * 512),
    ],
)
def test_a_token_has_latent_in_every_layer_and_index_k_in_those_with_an_indexer(
    tmp_path: Path, kv_cache_dtype: str, bytes_per_token: int
) -> None:
    spec = pool_spec(tmp_path, GLM_5_2, kv_cache_dtype=kv_cache_dtype)
    assert len(spec.layers("latent")) == 78
    assert len(spec.layers("index")) == 21
    assert spec.bytes_per_token == bytes_per_token


@pytest.mark.parametrize(
    ("shape", "style"), [(GlmModelShape(), "interleaved"), (ModelShape(), "half-split")]
)
def test_the_fingerprint_of_index_k_names_the_architectures_rope(
    tmp_path: Path, shape: ModelShape, style: str
) -> None:
    fingerprint = pool_spec(tmp_path, shape).index.fingerprint
    assert f"rope_style={style}" in fingerprint
    assert f"rope_pairing={style}" in fingerprint

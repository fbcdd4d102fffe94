"""Frequencies, bit for bit those of transformers: their error grows with the position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRotaryEmbedding

from cp_shared_kv.model.rope import RotaryEmbedding
from cp_shared_kv.model.rope_parameters import rope_parameters

DEEPSEEK: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 64),
        ({"factor": 32.0, "original_max_position_embeddings": 512}, 16),
        ({"original_max_position_embeddings": 64}, 16),
        ({"mscale": 0.7, "mscale_all_dim": 1.3}, 64),
        ({"rope_theta": 1e6, "beta_fast": 16, "beta_slow": 2}, 64),
    ],
)
def test_cos_and_sin_equal_those_of_transformers(changes: dict[str, Any], width: int) -> None:
    settings = {**DEEPSEEK, **changes}
    theirs = transformers.DeepseekV32Config(
        qk_rope_head_dim=width, max_position_embeddings=163840, rope_parameters=dict(settings)
    )
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    positions = torch.tensor([0, 1, 513, 11357, 163839])
    angles = positions.float().unsqueeze(1) * frequencies
    ours = RotaryEmbedding(rope_parameters({"rope_parameters": settings}), width).at(positions)
    assert torch.equal(ours.cos, angles.cos() * scale)
    assert torch.equal(ours.sin, angles.sin() * scale)


@pytest.mark.parametrize("theta", [1e6, 8e6, 1000000])
def test_plain_rope_equals_that_of_transformers(theta: float) -> None:
    settings = {"rope_type": "default", "rope_theta": theta}
    theirs = transformers.GlmMoeDsaConfig(qk_rope_head_dim=64, rope_parameters=dict(settings))
    frequencies, _ = GlmMoeDsaRotaryEmbedding.compute_default_rope_parameters(theirs)
    positions = torch.tensor([0, 1, 513, 202751, 1048575])
    angles = positions.float().unsqueeze(1) * frequencies
    ours = RotaryEmbedding(rope_parameters({"rope_parameters": settings}), 64).at(positions)
    assert torch.equal(ours.cos, angles.cos())
    assert torch.equal(ours.sin, angles.sin())

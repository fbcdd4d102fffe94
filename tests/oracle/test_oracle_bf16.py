"""bf16 against fp32, on a model whose branches are small enough for the two to be compared.

In bf16 a score or an expert near a threshold changes places, and on an untamed random model that
alone costs more than any mistake would. Small residual branches keep such flips small.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.model.weights import load_weights
from cp_shared_kv.reads.group import SoloGroup
from cp_shared_kv.testing.model_on_ranks import compute
from cp_shared_kv.testing.oracle_cases import ORACLE_SHAPES, prompt
from cp_shared_kv.testing.recording_ops import RecordedSelections
from cp_shared_kv.testing.schedule import PlannedRequest, Schedule, Span
from cp_shared_kv.testing.transformers_oracle import TransformersOracle

TOKENS = prompt(5, 200)
SCHEDULE = Schedule(16, [PlannedRequest(TOKENS)], [[Span(0, 0, 120)], [Span(0, 120, 200)]])
TOLERANCE = 0.04


WRONG_ROPE = {"deepseek_v32": "interleaved", "glm_moe_dsa, list": "half-split"}


@dataclass(frozen=True)
class Tamed:
    checkpoint: Path
    expected: torch.Tensor
    wrong_rope: str


@pytest.fixture(scope="module", params=list(WRONG_ROPE))
def tamed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tamed:
    name: str = request.param
    checkpoint = tmp_path_factory.mktemp("bf16") / "model"
    shape = dataclasses.replace(ORACLE_SHAPES[name], branch_scale=0.1)
    make_tiny_checkpoint(checkpoint, shape, seed=0)
    expected = TransformersOracle(checkpoint).logits_and_selections(TOKENS)[0]
    return Tamed(checkpoint, expected, WRONG_ROPE[name])


def bf16_error(tamed: Tamed, **changes: Any) -> float:
    config = ModelConfig.from_directory(tamed.checkpoint)
    weights = load_weights(tamed.checkpoint, config, torch.bfloat16)
    recorded = RecordedSelections()
    transformer = Transformer(dataclasses.replace(config, **changes), weights, recorded.ops)
    computed = compute(transformer, recorded, SoloGroup(), SCHEDULE, "in-seq-split")
    assert computed.logits.dtype == torch.float32
    return float((computed.logits - tamed.expected).norm() / tamed.expected.norm())


def test_bf16_stays_near_an_fp32_run_of_transformers(tamed: Tamed) -> None:
    assert bf16_error(tamed) < TOLERANCE


def test_the_bf16_tolerance_tells_a_wrong_indexer_rope(tamed: Tamed) -> None:
    assert bf16_error(tamed, index_rope_style=tamed.wrong_rope) > 2 * TOLERANCE

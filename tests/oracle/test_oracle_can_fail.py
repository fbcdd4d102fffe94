"""Plausible mistakes are far outside the bound, so agreement with the oracle means something."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.model.weights import load_weights
from cp_shared_kv.reads.group import SoloGroup
from cp_shared_kv.testing.model_on_ranks import compute
from cp_shared_kv.testing.recording_ops import RecordedSelections

MISTAKES: dict[str, dict[str, Any]] = {
    "interleaved indexer rope": {"index_rope_style": "interleaved"},
    "dense attention": {"index_topk": 4096},
    "one position too few": {"index_topk": 15},
    "no renormalised expert shares": {"norm_topk_prob": False},
    "all expert groups": {"topk_group": 4},
    "another norm epsilon": {"rms_norm_eps": 1e-4},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_ten_times_outside_the_bound(model: Any, mistake: str) -> None:
    config = ModelConfig.from_directory(model.checkpoint)
    weights = load_weights(model.checkpoint, config, torch.float32)
    recorded = RecordedSelections()
    wrong = Transformer(dataclasses.replace(config, **MISTAKES[mistake]), weights, recorded.ops)
    schedule = model.schedules["one-shot"]
    computed = compute(wrong, recorded, SoloGroup(), schedule, "in-seq-split")
    expected, _ = model.oracle.logits_and_selections(schedule.requests[0].token_ids)
    error = float((computed.logits - expected).norm() / expected.norm())
    assert error > 2e-5
    if mistake in ("interleaved indexer rope", "dense attention"):
        assert error > 0.1


def test_a_yarn_mistake_is_outside_the_bound(model: Any) -> None:
    config = ModelConfig.from_directory(model.checkpoint)
    weights = load_weights(model.checkpoint, config, torch.float32)
    assert config.rope.yarn is not None
    plain = dataclasses.replace(config, rope=dataclasses.replace(config.rope, yarn=None))
    recorded = RecordedSelections()
    schedule = model.schedules["one-shot"]
    wrong = Transformer(plain, weights, recorded.ops)
    computed = compute(wrong, recorded, SoloGroup(), schedule, "in-seq-split")
    expected, _ = model.oracle.logits_and_selections(schedule.requests[0].token_ids)
    assert float((computed.logits - expected).norm() / expected.norm()) > 0.1

"""Plausible mistakes are far outside the bound, so agreement with the oracle means something."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cp_shared_kv.model.attention import SparseAttention
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.model.weights import ModelWeights, load_weights
from cp_shared_kv.reads.group import SoloGroup
from cp_shared_kv.testing.model_on_ranks import compute
from cp_shared_kv.testing.recording_ops import RecordedSelections

COMMON: dict[str, dict[str, Any]] = {
    "dense attention": {"index_topk": 4096},
    "one position too few": {"index_topk": 15},
    "no renormalised expert shares": {"norm_topk_prob": False},
    "another norm epsilon": {"rms_norm_eps": 1e-4},
}
MISTAKES: dict[str, dict[str, dict[str, Any]]] = {
    "deepseek_v32": COMMON
    | {
        "indexer rope of GLM": {"index_rope_style": "interleaved"},
        "all expert groups": {"topk_group": 4},
    },
    "glm_moe_dsa, list": COMMON | {"indexer rope of DeepSeek": {"index_rope_style": "half-split"}},
}
GROSS = ("dense attention", "indexer rope of GLM", "indexer rope of DeepSeek")


def relative_error(model: Any, config: ModelConfig, weights: ModelWeights) -> float:
    """Of the logits of the one-shot case, computed with a config or weights that are wrong."""
    recorded = RecordedSelections()
    schedule = model.schedules["one-shot"]
    wrong = Transformer(config, weights, recorded.ops)
    computed = compute(wrong, recorded, SoloGroup(), schedule, "in-seq-split")
    expected, _ = model.oracle.logits_and_selections(schedule.requests[0].token_ids)
    return float((computed.logits - expected).norm() / expected.norm())


def loaded(model: Any) -> tuple[ModelConfig, ModelWeights]:
    config = ModelConfig.from_directory(model.checkpoint)
    return config, load_weights(model.checkpoint, config, torch.float32)


@pytest.mark.parametrize(
    ("model", "mistake"),
    [(name, mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes],
    indirect=["model"],
)
def test_a_mistake_is_ten_times_outside_the_bound(
    request: pytest.FixtureRequest, model: Any, mistake: str
) -> None:
    changes = MISTAKES[request.node.callspec.params["model"]][mistake]
    config, weights = loaded(model)
    error = relative_error(model, dataclasses.replace(config, **changes), weights)
    assert error > (0.1 if mistake in GROSS else 2e-5)


@pytest.mark.parametrize("model", ["deepseek_v32"], indirect=True)
def test_a_yarn_mistake_is_outside_the_bound(model: Any) -> None:
    config, weights = loaded(model)
    assert config.rope.yarn is not None
    plain = dataclasses.replace(config, rope=dataclasses.replace(config.rope, yarn=None))
    assert relative_error(model, plain, weights) > 0.1


@pytest.mark.parametrize("model", ["glm_moe_dsa, list"], indirect=True)
def test_sharing_an_indexer_instead_of_its_selection_is_outside_the_bound(model: Any) -> None:
    config, weights = loaded(model)
    layers = list(weights.layers)
    for index, layer in enumerate(layers):
        indexer = layer.attention.indexer or layers[index - 1].attention.indexer
        attention = dataclasses.replace(layer.attention, indexer=indexer)
        layers[index] = dataclasses.replace(layer, attention=attention)
    every = dataclasses.replace(config, full_indexer_layers=(True,) * len(layers))
    wrong = dataclasses.replace(weights, layers=tuple(layers))
    assert relative_error(model, every, wrong) > 0.1


@pytest.mark.parametrize("model", ["glm_moe_dsa, list"], indirect=True)
def test_sharing_the_first_selection_instead_of_the_last_is_outside_the_bound(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    selected: list[torch.Tensor] = []
    forward = SparseAttention.forward

    def share_the_first(self: SparseAttention, *arguments: Any) -> tuple[torch.Tensor, ...]:
        shared = selected[0] if selected else arguments[-1]
        attended, chosen = forward(self, *arguments[:-1], shared)
        selected.append(chosen)
        return attended, chosen

    monkeypatch.setattr(SparseAttention, "forward", share_the_first)
    assert relative_error(model, *loaded(model)) > 0.1

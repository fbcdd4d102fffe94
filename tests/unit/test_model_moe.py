"""Routing and mixing of experts, against the equations written out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.moe import MixtureOfExperts, gated_mlp
from cp_shared_kv.model.weights import MLPWeights, MoEWeights

CONFIG = ModelConfig.from_dict(ModelShape().config())  # 8 experts in 4 groups; 2 groups, 2 experts
HIDDEN = CONFIG.hidden_size


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def weights(**changes: Any) -> MoEWeights:
    whole = MoEWeights(
        router=drawn(8, HIDDEN, seed=1),
        correction_bias=drawn(8, seed=2),
        gate_up_proj=drawn(8, 2 * 64, HIDDEN, seed=3),
        down_proj=drawn(8, HIDDEN, 64, seed=4),
        shared=MLPWeights(drawn(2 * 64, HIDDEN, seed=5), drawn(HIDDEN, 64, seed=6)),
    )
    return dataclasses.replace(whole, **changes)


def test_output_is_the_weighed_sum_of_chosen_experts_and_the_shared_one() -> None:
    w, x = weights(), drawn(20, HIDDEN, seed=7) * 10
    moe = MixtureOfExperts(CONFIG, w)
    experts, shares = moe.route(x)
    got = moe.forward(x)
    for row in range(20):
        one = x[row : row + 1]
        expected = gated_mlp(one, w.shared.gate_up_proj, w.shared.down_proj)
        for expert, share in zip(experts[row].tolist(), shares[row], strict=True):
            expected = expected + share * gated_mlp(
                one, w.gate_up_proj[expert], w.down_proj[expert]
            )
        torch.testing.assert_close(got[row : row + 1], expected, rtol=1e-4, atol=1e-5)


def test_shares_sum_to_the_scaling_factor() -> None:
    _, shares = MixtureOfExperts(CONFIG, weights()).route(drawn(20, HIDDEN, seed=7))
    assert shares.sum(1).tolist() == pytest.approx([2.5] * 20)


def test_without_renormalising_a_share_is_the_scaled_sigmoid() -> None:
    config = dataclasses.replace(CONFIG, norm_topk_prob=False)
    w, x = weights(), drawn(5, HIDDEN, seed=7)
    experts, shares = MixtureOfExperts(config, w).route(x)
    torch.testing.assert_close(shares, 2.5 * (x @ w.router.T).sigmoid().gather(1, experts))


def test_the_bias_chooses_but_does_not_weigh() -> None:
    x = torch.zeros(1, HIDDEN)  # every expert scores 0.5
    bias = torch.tensor([0, 0, 0, 0, 9.0, 0, 0, 7.0])
    experts, shares = MixtureOfExperts(CONFIG, weights(correction_bias=bias)).route(x)
    assert sorted(experts[0].tolist()) == [4, 7]
    assert shares[0].tolist() == pytest.approx([1.25, 1.25])


def test_a_group_is_judged_by_its_two_best_together() -> None:
    x = torch.zeros(1, HIDDEN)
    # Expert 0 is the best of all, but groups {2, 3} and {4, 5} are better as pairs.
    bias = torch.tensor([3.0, -9.0, 2.0, 2.0, 2.5, 2.0, 0.0, 0.0])
    experts, _ = MixtureOfExperts(CONFIG, weights(correction_bias=bias)).route(x)
    assert 0 not in experts[0].tolist()
    assert 4 in experts[0].tolist()


def test_no_rows_give_no_rows() -> None:
    assert MixtureOfExperts(CONFIG, weights()).forward(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)

"""The margin of a router's nearest choice, between experts and between groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cp_shared_kv.testing.routing_margin import least_routing_margin


def margin(bias: list[float], **sizes: int) -> float:
    """Of two rows for which every expert scores 0.5 before the bias."""
    gate: Any = SimpleNamespace(
        weight=torch.zeros(len(bias), 3), e_score_correction_bias=torch.tensor(bias), **sizes
    )
    return least_routing_margin(gate, torch.ones(1, 2, 3))


def test_one_group_is_decided_between_its_experts() -> None:
    bias = [0.5, 0.0, 0.25, 0.125]
    assert margin(bias, num_group=1, topk_group=1, top_k=1) == pytest.approx(0.25)
    assert margin(bias, num_group=1, topk_group=1, top_k=2) == pytest.approx(0.125)
    assert margin(bias, num_group=1, topk_group=1, top_k=4) == float("inf")


def test_groups_are_decided_by_the_sum_of_their_two_best() -> None:
    bias = [1.0, 0.0, 0.0, 0.5, 0.25, 0.0]  # sums 2.0 and 1.75; then 1.5 against 0.5
    assert margin(bias, num_group=2, topk_group=1, top_k=1) == pytest.approx(0.25)


def test_experts_of_a_group_left_out_are_no_rivals() -> None:
    bias = [3.0, 1.0, 0.0, 2.99, -2.0, -2.0]
    assert margin(bias, num_group=2, topk_group=1, top_k=1) == pytest.approx(2.0)


def test_the_nearest_row_counts() -> None:
    gate: Any = SimpleNamespace(
        weight=torch.eye(3),
        e_score_correction_bias=torch.zeros(3),
        num_group=1,
        topk_group=1,
        top_k=1,
    )
    hidden = torch.tensor([[9.0, 0.0, 0.0], [0.0, 1e-6, 0.0]])
    assert least_routing_margin(gate, hidden) == pytest.approx(0.25e-6, rel=1e-3)

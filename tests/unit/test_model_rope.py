"""Rotary embedding: both pairings, and YaRN's frequencies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cp_shared_kv.model.rope import RotaryEmbedding
from cp_shared_kv.model.rope_parameters import RopeParameters, rope_parameters

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
PLAIN = RopeParameters(theta=10000.0)
STYLES: list[Any] = ["interleaved", "half-split"]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("style", STYLES)
def test_position_zero_turns_nothing(style: Any) -> None:
    x = drawn(1, 2, 16)
    assert torch.equal(RotaryEmbedding(PLAIN, 16).at(torch.tensor([0])).apply(x, style), x)


@pytest.mark.parametrize("style", STYLES)
def test_a_dot_product_depends_on_the_distance_alone(style: Any) -> None:
    rope = RotaryEmbedding(PLAIN, 16)
    q, k = drawn(2, 1, 16)

    def product(at_q: int, at_k: int) -> float:
        turned = [
            rope.at(torch.tensor([position])).apply(x.unsqueeze(0), style)
            for x, position in ((q, at_q), (k, at_k))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), rel=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), rel=1e-2)


def test_interleaved_turns_neighbours_and_half_split_turns_across() -> None:
    rotation = RotaryEmbedding(PLAIN, 8).at(torch.tensor([3]))
    x = torch.zeros(1, 1, 8)
    x[..., 0] = 1.0
    assert rotation.apply(x, "interleaved").nonzero()[:, -1].tolist() == [0, 1]
    assert rotation.apply(x, "half-split").nonzero()[:, -1].tolist() == [0, 4]
    assert float(rotation.apply(x, "half-split")[0, 0, 4]) == pytest.approx(math.sin(3.0))


def test_the_two_pairings_are_one_up_to_a_permutation() -> None:
    rotation = RotaryEmbedding(PLAIN, 16).at(torch.arange(5))
    x = drawn(5, 2, 16)
    across = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
    turned = rotation.apply(x, "interleaved")
    expected = torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1)
    assert torch.equal(rotation.apply(across, "half-split"), expected)


def test_bf16_is_rotated_in_fp32() -> None:
    rotation = RotaryEmbedding(PLAIN, 16).at(torch.tensor([1234]))
    x = drawn(1, 1, 16).bfloat16()
    expected = rotation.apply(x.float(), "interleaved").bfloat16()
    assert torch.equal(rotation.apply(x, "interleaved"), expected)


def test_yarn_keeps_fast_frequencies_and_stretches_slow_ones() -> None:
    positions = torch.tensor([1])
    plain = RotaryEmbedding(PLAIN, 64).at(positions)
    yarn = RotaryEmbedding(rope_parameters({"rope_parameters": YARN}), 64).at(positions)
    ratio = torch.atan2(plain.sin, plain.cos) / torch.atan2(yarn.sin, yarn.cos)
    assert ratio[0, :10].tolist() == pytest.approx([1.0] * 10)
    assert ratio[0, 23:].tolist() == pytest.approx([40.0] * 9, rel=1e-4)
    assert torch.all(ratio[0, 1:] >= ratio[0, :-1] - 1e-3)


def test_mscale_without_mscale_all_dim_lengthens_the_rotated() -> None:
    settings = {name: value for name, value in YARN.items() if not name.startswith("mscale")}
    parameters = rope_parameters({"rope_parameters": settings})
    assert parameters.rotation_scale == pytest.approx(0.1 * math.log(40) + 1)
    assert parameters.softmax_multiplier == 1.0
    rotation = RotaryEmbedding(parameters, 16).at(torch.tensor([0]))
    assert float(rotation.cos[0, 0]) == pytest.approx(parameters.rotation_scale)

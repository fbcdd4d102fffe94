"""Top-k by kernel against the reference: the same columns, ties and padding, on every path."""

from __future__ import annotations

import pytest
import torch

from cp_shared_kv.model.ops import reference


def check(
    device: torch.device,
    scores: torch.Tensor,
    visible: torch.Tensor,
    k: int,
    most_listed: int,
) -> None:
    from cp_shared_kv.kernels.select_topk import select_topk

    expected = reference.select_topk(scores, visible, k)
    got = select_topk(scores.to(device), visible.to(device), k, most_listed=most_listed)
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("most_listed", [16384, 64])
@pytest.mark.parametrize(
    ("count", "k"), [(1, 1), (5, 8), (64, 64), (500, 64), (9001, 64), (9001, 5000), (5000, 1)]
)
def test_random_scores(device: torch.device, count: int, k: int, most_listed: int) -> None:
    generator = torch.Generator().manual_seed(count * k)
    scores = torch.randn(6, count, generator=generator)
    visible = torch.randint(1, count + 1, (6,), generator=generator)
    visible[0] = count
    check(device, scores, visible, k, most_listed)


@pytest.mark.parametrize("most_listed", [16384, 64])
def test_of_equal_scores_the_lowest_columns(device: torch.device, most_listed: int) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (5, 5000), generator=generator).float()
    scores[1] = 0.0
    scores[2] = -torch.zeros(5000)
    scores[2, ::3] = 0.0
    scores[3, 70:] = float("-inf")
    visible = torch.tensor([5000, 5000, 4999, 5000, 66])
    check(device, scores, visible, 65, most_listed)


def test_nan_is_above_all_and_hidden_columns_count_for_nothing(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 700, generator=generator)
    scores[:, 5] = float("nan")
    scores[:, 9] = float("inf")
    scores[:, 600:] = 100.0
    scores[1, 650] = float("nan")
    check(device, scores, torch.tensor([600, 600]), 40, 16384)


def test_rows_may_be_apart(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(4, 1000, generator=generator)
    check(device, wide[:, :777], torch.full((4,), 777), 50, 16384)

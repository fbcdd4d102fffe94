"""Index scores piece by piece, and the best of them: the same bits as all at once."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_shared_kv.model.ops.reference import REFERENCE_OPS, index_scores, select_topk
from cp_shared_kv.model.running_topk import RunningTopK
from cp_shared_kv.reads.piece_size import PIECE_TOKENS


def by_pieces(scores: torch.Tensor, visible: torch.Tensor, k: int, cuts: list[int]) -> torch.Tensor:
    best = RunningTopK(REFERENCE_OPS, visible, k)
    edges = [0, *cuts, scores.shape[1]]
    for start, stop in itertools.pairwise(edges):
        best.add(start, scores[:, start:stop].clone(), last=stop == scores.shape[1])
    return best.positions


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_best_piece_by_piece_are_the_best_of_all(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    # Few distinct values, so that ties cross the threshold, and pieces, nearly always.
    values = st.sampled_from([-1.5, -0.0, 0.0, 0.25, 2.0, float("-inf"), float("nan")])
    flat = data.draw(st.lists(values, min_size=rows * columns, max_size=rows * columns))
    seen = data.draw(st.lists(st.integers(1, columns), min_size=rows, max_size=rows))
    k = data.draw(st.integers(1, 45))
    cuts = sorted(data.draw(st.sets(st.integers(1, columns - 1))) if columns > 1 else [])
    scores, visible = torch.tensor(flat).view(rows, columns), torch.tensor(seen)
    if scores.isnan().any() and (visible > k).any():
        scores = scores.nan_to_num(nan=0.25)  # of more than k with NaN among them any are right
    assert torch.equal(
        by_pieces(scores, visible, k, cuts), select_topk(scores, visible, min(k, columns))
    )


@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 64, 128), (3, 8, 32), (128, 64, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_a_part_are_those_of_the_whole(
    rows: int, heads: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, heads, width, generator=generator).to(dtype)
    weights = torch.randn(rows, heads, generator=generator)
    keys = torch.randn(2 * PIECE_TOKENS + 777, width, generator=generator).to(dtype)
    whole = index_scores(q, weights, keys)
    for start in range(0, len(keys), PIECE_TOKENS):
        stop = start + PIECE_TOKENS
        part = index_scores(q, weights, keys[start:stop].clone())
        assert torch.equal(part, whole[:, start:stop])

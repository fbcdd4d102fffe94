"""The reference ops against their equations, written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_shared_kv.model.ops.reference import index_scores, select_topk, sparse_attention


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("rows", "heads", "keys"), [(3, 4, 50), (1, 2, 1), (128, 64, 700), (1, 8, 3000)]
)
def test_index_scores_follow_the_equation(rows: int, heads: int, keys: int) -> None:
    q, weights, k = drawn(rows, heads, 16), drawn(rows, heads, seed=1), drawn(keys, 16, seed=2)
    products = torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    expected = (products * weights.double().unsqueeze(-1)).sum(1)
    torch.testing.assert_close(index_scores(q, weights, k).double(), expected, rtol=1e-5, atol=1e-4)


def test_index_scores_of_bf16_are_summed_in_fp32() -> None:
    q, k = drawn(4, 8, 16).bfloat16(), drawn(20, 16, seed=1).bfloat16()
    weights = drawn(4, 8, seed=2)
    scores = index_scores(q, weights, k)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, index_scores(q.float(), weights, k.float()))


def best_by_full_sort(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    rows: list[list[int]] = []
    for row, seen in zip(scores.tolist(), visible.tolist(), strict=True):
        best = sorted(range(seen), key=lambda column: (-row[column], column))[:k]
        rows.append(sorted(best) + [-1] * (min(k, scores.shape[1]) - len(best)))
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), min(k, scores.shape[1]))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_select_topk_is_the_full_sort_with_the_lowest_of_equals(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    # Few distinct values, so that ties cross the threshold nearly always.
    values = st.sampled_from([-1.5, -0.0, 0.0, 0.25, 2.0])
    flat = data.draw(st.lists(values, min_size=rows * columns, max_size=rows * columns))
    seen = data.draw(st.lists(st.integers(1, columns), min_size=rows, max_size=rows))
    k = data.draw(st.integers(1, 45))
    scores, visible = torch.tensor(flat).view(rows, columns), torch.tensor(seen)
    assert torch.equal(select_topk(scores, visible, k), best_by_full_sort(scores, visible, k))


@pytest.mark.parametrize("columns", [100, 9000])
def test_of_equal_scores_the_lowest_positions_win(columns: int) -> None:
    scores = torch.zeros(3, columns)
    scores[1, columns - 1] = 1.0
    scores[2, :4] = -1.0
    chosen = select_topk(scores, torch.full((3,), columns), 16)
    assert chosen[0].tolist() == list(range(16))
    assert chosen[1].tolist() == [*range(15), columns - 1]
    assert chosen[2].tolist() == list(range(4, 20))


def test_select_topk_of_many_columns_is_the_full_sort() -> None:
    scores = drawn(6, 9000).mul(50).round()  # rounded, so with ties
    visible = torch.tensor([1, 15, 16, 17, 4500, 9000])
    assert torch.equal(select_topk(scores, visible, 16), best_by_full_sort(scores, visible, 16))


def test_selecting_leaves_the_scores_alone() -> None:
    scores, visible = drawn(4, 60), torch.tensor([10, 20, 30, 60])
    before = scores.clone()
    select_topk(scores, visible, 8)
    assert torch.equal(scores, before)


def test_a_score_that_is_not_a_number_still_gives_positions_in_range() -> None:
    scores = torch.zeros(1, 50)
    scores[0, [7, 30]] = float("nan")
    chosen = select_topk(scores, torch.tensor([50]), 4)
    assert chosen.tolist() == [[0, 1, 7, 30]]


def test_sparse_attention_is_a_softmax_over_the_valid_rows() -> None:
    q_latent, q_pe = drawn(5, 3, 8), drawn(5, 3, 4, seed=1)
    latent, k_pe = drawn(5, 6, 8, seed=2), drawn(5, 6, 4, seed=3)
    valid = torch.arange(6) < torch.tensor([[1], [2], [3], [6], [6]])
    got = sparse_attention(q_latent, q_pe, latent, k_pe, valid, 0.3)
    for row in range(5):
        count = int(valid[row].sum())
        keys = torch.cat([latent[row, :count], k_pe[row, :count]], dim=1)
        queries = torch.cat([q_latent[row], q_pe[row]], dim=1)
        expected = (queries @ keys.T * 0.3).softmax(-1) @ latent[row, :count]
        torch.testing.assert_close(got[row], expected, rtol=1e-5, atol=1e-6)


def test_what_is_not_valid_has_no_influence() -> None:
    arguments = [drawn(2, 3, 8), drawn(2, 3, 4), drawn(2, 6, 8), drawn(2, 6, 4)]
    valid = torch.arange(6).expand(2, 6) < 4
    before = sparse_attention(*arguments, valid, 1.0)
    arguments[2][:, 4:], arguments[3][:, 4:] = 1e6, -1e6
    assert torch.equal(sparse_attention(*arguments, valid, 1.0), before)


def test_sparse_attention_keeps_the_dtype_of_its_queries() -> None:
    arguments = [drawn(2, 3, 8), drawn(2, 3, 4), drawn(2, 6, 8), drawn(2, 6, 4)]
    valid = torch.ones(2, 6, dtype=torch.bool)
    narrow = [argument.bfloat16() for argument in arguments]
    got = sparse_attention(*narrow, valid, 0.5)
    assert got.dtype == torch.bfloat16
    expected = sparse_attention(*(a.float() for a in narrow), valid, 0.5)
    assert torch.equal(got, expected.bfloat16())

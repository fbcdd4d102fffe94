"""Comparing by bytes names the first element that differs."""

from __future__ import annotations

import pytest
import torch

from cp_shared_kv.testing.bitwise import assert_bitwise_equal, first_difference


def test_equal_bytes_are_equal_and_nan_is_no_exception() -> None:
    values = torch.tensor([[1.0, float("nan")], [-0.0, 3.0]])
    assert first_difference(values, values.clone()) is None
    assert first_difference(values, values.numpy().copy()) is None
    assert first_difference(torch.empty(0, 3), torch.empty(0, 3)) is None


def test_first_difference_has_its_index_and_both_values_in_hex() -> None:
    left = torch.zeros(2, 3)
    right = left.clone()
    right[1, 0], right[1, 2] = -0.0, 1.0
    difference = first_difference(left, right)
    assert difference is not None
    assert difference.index == (1, 0)
    assert (difference.left_hex, difference.right_hex) == ("0x00000000", "0x80000000")
    assert difference.count == 2
    with pytest.raises(
        AssertionError,
        match=r"logits: first difference at index \(1, 0\): 0x00000000 and 0x80000000 \(2 ele",
    ):
        assert_bitwise_equal(left, right, "logits")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_last_bit_counts_in_every_dtype(dtype: torch.dtype) -> None:
    left = torch.ones(4, dtype=dtype)
    right = left.clone()
    right.view(torch.uint8)[2 * left.element_size()] ^= 1
    difference = first_difference(left, right)
    assert difference is not None
    assert (difference.index, difference.count) == ((2,), 1)
    assert len(difference.left_hex) == 2 + 2 * left.element_size()


def test_views_and_scalars_compare_by_value() -> None:
    grid = torch.arange(6.0).view(2, 3)
    assert first_difference(grid.T, grid.T.contiguous()) is None
    difference = first_difference(torch.tensor(1.0), torch.tensor(2.0))
    assert difference is not None
    assert difference.index == ()


def test_other_shapes_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"float32\[2\] with float32\[3\]"):
        first_difference(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="float32"):
        first_difference(torch.zeros(2), torch.zeros(2, dtype=torch.int32))

"""The receiver's proof that each page came once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.layout import ExactCover


def test_positions_of_several_senders_in_any_order_complete_the_cover() -> None:
    cover = ExactCover(5)
    cover.add(np.array([4, 0]), "rank 0")
    cover.add(np.array([], np.int64), "rank 1")
    assert (cover.complete, cover.count, cover.missing().tolist()) == (False, 2, [1, 2, 3])
    cover.add(np.array([2, 3, 1], np.int32), "rank 2")
    assert (cover.complete, cover.count, cover.missing().tolist()) == (True, 5, [])


def test_a_reservation_without_pages_is_covered_from_the_start() -> None:
    cover = ExactCover(0)
    assert cover.complete
    with pytest.raises(LayoutError, match="rank 0 outside the reservation: 0; allowed: none"):
        cover.add(np.array([0]), "rank 0")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1, 5], r"from rank 1 outside the reservation: 5; allowed: 0\.\.4"),
        ([-1, 7, 1], r"outside the reservation: -1, 7; allowed"),
        ([1, 3, 0], r"from rank 1 sent twice, the first of them by rank 0 before: 0, 3;"),
        ([2, 1, 2], r"from rank 1 sent twice, the first of them by rank 1 before: 2;"),
    ],
)
def test_wrong_positions_are_named_and_change_nothing(wrong: list[int], message: str) -> None:
    cover = ExactCover(5)
    cover.add(np.array([0, 3]), "rank 0")
    with pytest.raises(LayoutError, match=message):
        cover.add(np.array(wrong), "rank 1")
    assert (cover.count, cover.missing().tolist()) == (2, [1, 2, 4])
    cover.add(np.array([1, 2, 4]), "rank 1")
    assert cover.complete


def test_a_long_list_of_wrong_positions_is_cut() -> None:
    with pytest.raises(LayoutError, match="reservation: 1, 2, 3, 4, 5, 6, 7, 8 and 991 more;"):
        ExactCover(1).add(np.arange(1, 1000), "rank 0")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.array([0.0]), "positions are of a dtype"),
        (np.array([True]), "positions are of a dtype"),
        (np.array([[0]]), "positions from rank 0 are not a list"),
        ([0], "positions are not in an array"),
    ],
)
def test_what_is_no_list_of_positions_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ExactCover(1).add(wrong, "rank 0")


@pytest.mark.parametrize("size", [-1, 2.0, True])
def test_a_size_that_is_no_count_is_refused(size: Any) -> None:
    with pytest.raises(LayoutError, match="size is"):
        ExactCover(size)

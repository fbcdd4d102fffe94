"""What the layout refuses, and that the message names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cp_shared_kv import CpSharedKVLayout
from cp_shared_kv.errors import LayoutError

# Pages 1..32 and locs 16..527 of the pool.
LAYOUT = CpSharedKVLayout(page_size=16, cp_size=4, cp_rank=1, stripe_pages=2, physical_pages=8)
UNSIZED = CpSharedKVLayout(page_size=16, cp_size=4, cp_rank=1, stripe_pages=2)
LAST_ID = {
    "owner_for_logical_pages": 32,
    "owned_pages_mask": 32,
    "logical_pages_to_physical": 32,
    "owned_by_this_rank": 527,
    "logical_locs_to_physical": 527,
    "physical_pages_to_logical": 8,
}
KINDS = {"numpy": np.asarray, "torch": torch.as_tensor}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 0}, "page_size is too small: 0; allowed: >= 1"),
        ({"page_size": 64.0}, r"page_size is not a whole number: 64.0 \(float\)"),
        ({"page_size": np.int64(64)}, "page_size is not a whole number"),
        ({"cp_size": -1}, "cp_size is too small: -1"),
        ({"cp_size": True}, r"cp_size is not a whole number: True \(bool\)"),
        ({"cp_rank": 4}, r"cp_rank is not in the group: 4; allowed: 0\.\.3"),
        ({"cp_rank": -1}, "cp_rank is too small: -1"),
        ({"cp_rank": None}, "cp_rank is not a whole number"),
        ({"stripe_pages": 0}, "stripe_pages is too small: 0"),
        ({"stripe_pages": "2"}, "stripe_pages is not a whole number: '2'"),
        ({"physical_pages": 0}, "physical_pages is too small: 0"),
        ({"physical_pages": 8.5}, "physical_pages is not a whole number"),
        ({"physical_pages": 9}, "not a whole number of stripes: 9; .*stripe_pages=2; .*use 8"),
        ({"physical_pages": 1}, "not a whole number of stripes: 1; .*use 2"),
        ({"physical_pages": 2**60}, "last loc does not fit int64"),
        ({"page_size": 2**62}, "last loc does not fit int64"),
    ],
)
def test_wrong_settings_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"page_size": 64, "cp_size": 4, "cp_rank": 0, "stripe_pages": 2}
    with pytest.raises(LayoutError, match=message):
        CpSharedKVLayout(**settings | change)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", LAST_ID)
def test_the_first_negative_id_is_named(method: str, kind: str) -> None:
    wrong = KINDS[kind](np.array([3, 0, -7, -9]))
    for layout in (LAYOUT, UNSIZED):
        with pytest.raises(LayoutError, match=r"outside the layout: -7 at index 2; allowed: 0"):
            getattr(layout, method)(wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", LAST_ID)
def test_the_first_id_past_the_pool_is_named(method: str, kind: str) -> None:
    last = LAST_ID[method]
    getattr(LAYOUT, method)(KINDS[kind](np.array([last])))
    with pytest.raises(LayoutError, match=rf": {last + 1} at index 1; allowed: 0\.\.{last};"):
        getattr(LAYOUT, method)(KINDS[kind](np.array([last, last + 1, last + 2])))
    if method != "physical_pages_to_logical":
        getattr(UNSIZED, method)(KINDS[kind](np.array([last + 1])))


def test_a_wrong_id_in_several_dimensions_is_named_by_all_its_indices() -> None:
    with pytest.raises(LayoutError, match=r"logical page outside the layout: 40 at index \(1, 0\)"):
        LAYOUT.owner_for_logical_pages(np.array([[1, 2], [40, -1]]))


def test_an_unsized_layout_refuses_physical_pages_whose_logical_page_leaves_int64() -> None:
    last = (2**63 - 1) // 4 - 2
    assert UNSIZED.physical_pages_to_logical(np.array([last]), owner=3)[0] > last
    with pytest.raises(LayoutError, match="physical page outside the layout"):
        UNSIZED.physical_pages_to_logical(np.array([last + 1]))


@pytest.mark.parametrize("owner", [-1, 4, 1.0, True])
def test_an_owner_outside_the_group_is_refused(owner: Any) -> None:
    with pytest.raises(LayoutError, match="owner is"):
        LAYOUT.physical_pages_to_logical(np.array([1]), owner=owner)


@pytest.mark.parametrize("method", LAST_ID)
@pytest.mark.parametrize(
    "wrong",
    [
        np.array([True, False]),
        np.array([1.0]),
        np.array([1], np.uint64),
        np.array(["1"]),
        np.array([1], object),
        torch.tensor([True]),
        torch.tensor([1.0]),
        torch.tensor([1], dtype=torch.uint64),
        torch.tensor([1j]),
    ],
    ids=lambda wrong: f"{type(wrong).__name__}-{wrong.dtype}",
)
def test_dtypes_that_are_no_ids_are_refused(method: str, wrong: Any) -> None:
    with pytest.raises(LayoutError, match="dtype that ids cannot have"):
        getattr(LAYOUT, method)(wrong)


@pytest.mark.parametrize("wrong", [[1, 2], 3, np.int64(3), None, "5"])
def test_what_is_no_array_is_refused(wrong: Any) -> None:
    with pytest.raises(LayoutError, match="logical pages are not in an array"):
        LAYOUT.owner_for_logical_pages(wrong)


@pytest.mark.parametrize(
    ("pages", "positions", "message"),
    [
        (np.array([1, 2]), np.array([0]), r"shape \(2,\) and ndarray of shape \(1,\)"),
        (np.array([[1, 2]]), np.array([[0, 1]]), r"shape \(1, 2\)"),
        (np.array(1), np.array(0), "two 1-D arrays"),
        (np.array([1]), torch.tensor([0]), "ndarray of shape .* and Tensor of shape"),
        (torch.tensor([1, 2]), torch.tensor([0]), "Tensor of shape"),
        (np.array([1, 2]), np.array([0, -1]), "position outside the layout: -1 at index 1"),
        (np.array([1, 2]), np.array([0.0, 1.0]), "positions are of a dtype"),
    ],
)
def test_pages_and_positions_that_do_not_go_together_are_refused(
    pages: Any, positions: Any, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        LAYOUT.filter_owned_pages(pages, positions)

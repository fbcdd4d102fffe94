"""The worked examples of the ownership map, and what its methods promise about their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cp_shared_kv import CpSharedKVLayout
from cp_shared_kv.errors import LayoutError

Make = Callable[[list[int]], Any]
METHODS = (
    "owner_for_logical_pages",
    "owned_pages_mask",
    "owned_by_this_rank",
    "logical_pages_to_physical",
    "logical_locs_to_physical",
    "physical_pages_to_logical",
)


@pytest.fixture(params=["numpy", "torch"])
def ids(request: pytest.FixtureRequest) -> Make:
    """Makes an int64 array of a list: each test runs once with NumPy and once with torch."""
    if request.param == "numpy":
        return lambda values: np.array(values, dtype=np.int64)
    return lambda values: torch.tensor(values, dtype=torch.int64)


def test_pages_are_dealt_to_the_ranks_in_turn_and_padding_to_nobody(ids: Make) -> None:
    layout = CpSharedKVLayout(page_size=64, cp_size=4, cp_rank=0)
    pages = ids([0, 1, 2, 3, 4, 5, 8, 9])
    assert layout.owner_for_logical_pages(pages).tolist() == [-1, 0, 1, 2, 3, 0, 3, 0]
    assert layout.logical_pages_to_physical(pages).tolist() == [0, 1, 1, 1, 1, 2, 2, 3]


def test_a_stripe_keeps_neighbouring_pages_on_one_rank(ids: Make) -> None:
    layout = CpSharedKVLayout(page_size=64, cp_size=3, cp_rank=1, stripe_pages=2)
    pages = ids(list(range(14)))
    owners = [-1, 0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 0]
    physical = [0, 1, 2, 1, 2, 1, 2, 3, 4, 3, 4, 3, 4, 5]
    assert layout.owner_for_logical_pages(pages).tolist() == owners
    assert layout.logical_pages_to_physical(pages).tolist() == physical
    assert layout.owned_pages_mask(pages).tolist() == [owner == 1 for owner in owners]


def test_a_rank_owns_the_locs_of_its_pages(ids: Make) -> None:
    layout = CpSharedKVLayout(page_size=64, cp_size=4, cp_rank=2)
    locs = ids([0, 64, 128, 192, 256, 320, 384])
    owned = layout.owned_by_this_rank(locs)
    assert owned.tolist() == [False, False, False, True, False, False, False]
    assert layout.logical_locs_to_physical(locs[owned]).tolist() == [64]


def test_a_loc_keeps_its_offset_within_the_page(ids: Make) -> None:
    layout = CpSharedKVLayout(page_size=48, cp_size=3, cp_rank=0, stripe_pages=2)
    locs = ids([0, 47, 48, 8 * 48 + 5, 9 * 48 + 47])
    physical = layout.logical_locs_to_physical(locs)
    assert physical.tolist() == [0, 47, 48, 4 * 48 + 5, 3 * 48 + 47]


@pytest.mark.parametrize("rank", range(4))
def test_the_last_rank_does_not_take_padding_for_its_own(ids: Make, rank: int) -> None:
    layout = CpSharedKVLayout(page_size=16, cp_size=4, cp_rank=rank)
    assert not layout.owned_pages_mask(ids([0])).any()
    assert not layout.owned_by_this_rank(ids([0, 7, 15])).any()


@pytest.mark.parametrize(
    ("rank", "pages", "positions", "physical", "kept"),
    [
        (1, range(1, 10), range(10, 19), [1, 2], [11, 15]),
        (2, range(9, 15), range(8, 14), [3], [10]),
        (0, [2, 3, 4], [0, 1, 2], [], []),
        (0, [], [], [], []),
    ],
)
def test_filtering_keeps_this_ranks_pages_with_their_positions(
    ids: Make,
    rank: int,
    pages: list[int],
    positions: list[int],
    physical: list[int],
    kept: list[int],
) -> None:
    layout = CpSharedKVLayout(page_size=64, cp_size=4, cp_rank=rank)
    got_physical, got_positions = layout.filter_owned_pages(ids([*pages]), ids([*positions]))
    assert got_physical.tolist() == physical
    assert got_positions.tolist() == kept


def test_filtering_keeps_the_order_of_shuffled_pages(ids: Make) -> None:
    layout = CpSharedKVLayout(page_size=64, cp_size=2, cp_rank=0)
    physical, positions = layout.filter_owned_pages(ids([9, 2, 1, 5]), ids([3, 0, 7, 1]))
    assert physical.tolist() == [5, 1, 3]
    assert positions.tolist() == [3, 7, 1]


def test_physical_pages_lead_back_to_the_logical_ones_of_their_owner(ids: Make) -> None:
    layout = CpSharedKVLayout(page_size=64, cp_size=4, cp_rank=1)
    assert layout.physical_pages_to_logical(ids([0, 1, 2, 3])).tolist() == [0, 2, 6, 10]
    assert layout.physical_pages_to_logical(ids([0, 1, 2, 3]), owner=3).tolist() == [0, 4, 8, 12]


def test_one_rank_alone_keeps_every_id(ids: Make) -> None:
    layout = CpSharedKVLayout(page_size=64, cp_size=1, cp_rank=0)
    everything = ids([0, 1, 2, 63, 64, 1000])
    assert layout.logical_pages_to_physical(everything).tolist() == everything.tolist()
    assert layout.logical_locs_to_physical(everything).tolist() == everything.tolist()
    assert layout.physical_pages_to_logical(everything).tolist() == everything.tolist()
    assert layout.owner_for_logical_pages(everything).tolist() == [-1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"])
def test_every_integer_dtype_comes_back_as_int64_in_the_same_kind(method: str, dtype: str) -> None:
    call = getattr(CpSharedKVLayout(page_size=16, cp_size=3, cp_rank=1), method)
    values = np.arange(120).reshape(2, 3, 20).astype(dtype)
    wanted = np.bool_ if method.startswith("owned") else np.int64
    from_numpy, from_torch = call(values), call(torch.from_numpy(values))
    assert (type(from_numpy), from_numpy.dtype, from_numpy.shape) == (
        np.ndarray,
        wanted,
        (2, 3, 20),
    )
    assert isinstance(from_torch, torch.Tensor)
    assert (from_torch.numpy().dtype, from_torch.shape) == (wanted, (2, 3, 20))
    assert np.array_equal(from_torch.numpy(), from_numpy)


def test_small_dtypes_do_not_overflow_on_the_way() -> None:
    layout = CpSharedKVLayout(page_size=64, cp_size=2, cp_rank=0)
    assert layout.physical_pages_to_logical(np.array([120], np.int8)).tolist() == [239]


@pytest.mark.parametrize("method", METHODS)
def test_the_callers_array_is_not_changed(ids: Make, method: str) -> None:
    call = getattr(CpSharedKVLayout(page_size=6, cp_size=3, cp_rank=1, stripe_pages=2), method)
    given = ids(list(range(40)))
    call(given)
    assert given.tolist() == list(range(40))


def test_views_with_strides_are_read_in_their_own_order(ids: Make) -> None:
    layout = CpSharedKVLayout(page_size=64, cp_size=4, cp_rank=0)
    every_third = ids(list(range(12)))[::3]
    assert layout.owner_for_logical_pages(every_third).tolist() == [-1, 2, 1, 0]


@pytest.mark.parametrize("method", METHODS)
def test_no_ids_give_no_results(ids: Make, method: str) -> None:
    call = getattr(CpSharedKVLayout(page_size=64, cp_size=4, cp_rank=0, physical_pages=8), method)
    assert call(ids([])).tolist() == []


def test_locs_beyond_int32_are_exact(ids: Make) -> None:
    layout = CpSharedKVLayout(page_size=64, cp_size=8, cp_rank=0)
    page = 2**38 + 5
    (physical,) = layout.logical_locs_to_physical(ids([page * 64 + 3])).tolist()
    assert physical == ((page - 1) // 8 + 1) * 64 + 3


def test_the_pooled_space_is_n_times_one_ranks_pages() -> None:
    layout = CpSharedKVLayout(page_size=64, cp_size=8, cp_rank=0, physical_pages=3708)
    assert layout.logical_pages == 29_664
    assert layout.logical_pages_to_physical(np.array([29_664])).tolist() == [3708]
    with pytest.raises(LayoutError, match="without physical_pages has no size"):
        _ = CpSharedKVLayout(page_size=64, cp_size=8, cp_rank=0).logical_pages

"""What holds for every layout, split and cover, checked against plain Python integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_shared_kv import CpSharedKVLayout
from cp_shared_kv.errors import LayoutError
from cp_shared_kv.layout import ExactCover, split_tokens

LARGEST_ID = 2**40
RANKS = st.integers(1, 16)
STRIPES = st.integers(1, 4)
PAGE_SIZES = st.sampled_from([1, 3, 16, 48, 64])
# A deadline would time the machine's other tenants.
QUICK = settings(max_examples=100, deadline=None)
IDS = st.lists(st.integers(0, LARGEST_ID), max_size=40)


@st.composite
def layouts(draw: st.DrawFn) -> CpSharedKVLayout:
    cp_size = draw(RANKS)
    cp_rank = draw(st.integers(0, cp_size - 1))
    return CpSharedKVLayout(draw(PAGE_SIZES), cp_size, cp_rank, draw(STRIPES))


def both_kinds(layout: CpSharedKVLayout, method: str, ids: np.ndarray, **more: Any) -> list[int]:
    """The result of a method, after checking that NumPy and torch agree on it."""
    from_numpy = getattr(layout, method)(ids, **more)
    from_torch = getattr(layout, method)(torch.from_numpy(ids), **more)
    assert from_torch.numpy().dtype == from_numpy.dtype
    assert from_torch.tolist() == from_numpy.tolist()
    return from_numpy.tolist()


@QUICK
@given(layouts(), IDS)
def test_pages_obey_the_formulas_and_lead_back(layout: CpSharedKVLayout, ids: list[int]) -> None:
    N, B = layout.cp_size, layout.stripe_pages
    pages = np.array(ids, dtype=np.int64)
    owners = both_kinds(layout, "owner_for_logical_pages", pages)
    physical = both_kinds(layout, "logical_pages_to_physical", pages)
    assert owners == [(p - 1) // B % N if p else -1 for p in ids]
    assert physical == [(p - 1) // (B * N) * B + (p - 1) % B + 1 if p else 0 for p in ids]
    assert both_kinds(layout, "owned_pages_mask", pages) == [o == layout.cp_rank for o in owners]
    for page, owner, at in zip(ids, owners, physical, strict=True):
        where = max(owner, 0)
        back = both_kinds(layout, "physical_pages_to_logical", np.array([at]), owner=where)
        assert back == [page]


@QUICK
@given(layouts(), IDS)
def test_locs_move_with_their_page(layout: CpSharedKVLayout, ids: list[int]) -> None:
    size = layout.page_size
    locs = np.array(ids, dtype=np.int64)
    owned = layout.owned_pages_mask(locs // size).tolist()
    physical = layout.logical_pages_to_physical(locs // size) * size + locs % size
    assert both_kinds(layout, "owned_by_this_rank", locs) == owned
    assert both_kinds(layout, "logical_locs_to_physical", locs) == physical.tolist()


@QUICK
@given(RANKS, STRIPES, st.integers(1, 6))
def test_a_pool_is_a_bijection_of_logical_pages_and_the_ranks_pages(
    cp_size: int, stripe_pages: int, stripes: int
) -> None:
    P = stripes * stripe_pages
    ranks = [CpSharedKVLayout(4, cp_size, r, stripe_pages, P) for r in range(cp_size)]
    pages = np.arange(1, cp_size * P + 1)
    stored = np.zeros(len(pages), dtype=np.int64)
    for layout in ranks:
        physical, positions = layout.filter_owned_pages(pages, np.arange(len(pages)))
        assert physical.tolist() == list(range(1, P + 1))
        assert layout.physical_pages_to_logical(physical).tolist() == pages[positions].tolist()
        stored[positions] += 1
    assert (stored == 1).all()


@QUICK
@given(
    st.sampled_from(["in-seq-split", "round-robin-split"]),
    st.lists(st.integers(0, 70) | st.integers(0, 1000), max_size=6),
    RANKS,
)
def test_a_split_gives_each_token_to_one_rank(mode: Any, counts: list[int], cp_size: int) -> None:
    shares = split_tokens(mode, counts, cp_size)
    assert len(shares) == cp_size
    assert np.sort(np.concatenate(shares)).tolist() == list(range(sum(counts)))
    per_request = 1 if mode == "round-robin-split" else 2 * len(counts)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= per_request


@QUICK
@given(st.lists(st.integers(0, 100), max_size=6), RANKS)
def test_in_seq_split_takes_segments_r_and_2n_minus_1_minus_r(
    counts: list[int], cp_size: int
) -> None:
    first, expected = 0, [[] for _ in range(cp_size)]
    for count in counts:
        # array_split makes the first count % 2N parts one longer, as the split must.
        segments = np.array_split(np.arange(first, first + count), 2 * cp_size)
        for rank in range(cp_size):
            expected[rank] += [*segments[rank].tolist(), *segments[-1 - rank].tolist()]
        first += count
    shares = split_tokens("in-seq-split", counts, cp_size)
    assert [share.tolist() for share in shares] == expected


@st.composite
def permutations_in_parts(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    order = draw(st.integers(0, 30).flatmap(lambda size: st.permutations(range(size))))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=5)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    return len(order), [list(part) for part in parts]


@QUICK
@given(permutations_in_parts())
def test_a_cover_accepts_every_permutation_in_any_parts(case: tuple[int, list[list[int]]]) -> None:
    size, parts = case
    cover = ExactCover(size)
    for index, part in enumerate(parts):
        cover.add(np.array(part, dtype=np.int64), f"rank {index}")
    assert cover.complete
    assert cover.count == size
    assert cover.missing().tolist() == []


@QUICK
@given(st.integers(0, 8), st.lists(st.lists(st.integers(-2, 10), max_size=5), max_size=8))
def test_a_cover_accepts_nothing_but_new_positions_inside(
    size: int, parts: list[list[int]]
) -> None:
    cover, covered = ExactCover(size), set[int]()
    for part in parts:
        fits = len(set(part)) == len(part) and set(part) <= set(range(size)) - covered
        if fits:
            cover.add(np.array(part, dtype=np.int64), "rank")
            covered |= set(part)
        else:
            with pytest.raises(LayoutError):
                cover.add(np.array(part, dtype=np.int64), "rank")
        assert cover.missing().tolist() == sorted(set(range(size)) - covered)
        assert cover.count == len(covered)
        assert cover.complete == (len(covered) == size)

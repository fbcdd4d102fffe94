"""From page pairs to byte ranges: few of them, and the same bytes as page by page."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages, Positions
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPoolSpec
from cp_shared_kv.transfer.descriptors import (
    PageAreas,
    expand,
    merge_pages,
    stripe_destinations,
)
from cp_shared_kv.transfer.transport import Runs


def pages(values: object) -> PhysicalPages:
    return PhysicalPages(np.array(values, dtype=np.int64))


def areas(
    page_bytes: tuple[int, ...], local_physical_pages: int, remote_physical_pages: int
) -> PageAreas:
    """Pools that hold one area behind the other, padding pages included."""
    sizes = np.array(page_bytes, dtype=np.int64)
    before = np.cumsum(sizes) - sizes
    return PageAreas(
        before * (local_physical_pages + 1),
        before * (remote_physical_pages + 1),
        sizes,
        local_physical_pages,
        remote_physical_pages,
    )


def copied(runs: Runs, source: np.ndarray, destination: np.ndarray) -> np.ndarray:
    """What a transport does, one byte at a time."""
    result = destination.copy()
    for start, to, nbytes in zip(
        runs.local_offset_bytes.tolist(),
        runs.remote_offset_bytes.tolist(),
        runs.nbytes.tolist(),
        strict=True,
    ):
        for i in range(nbytes):
            result[to + i] = source[start + i]
    return result


@st.composite
def page_pairs(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Distinct pages on both sides in stretches, as pools hand them out, in any order."""
    last = draw(st.integers(1, 12))
    ids = st.permutations(range(1, last + 1))
    count = draw(st.integers(0, last))
    destination = list(draw(ids))[:count]
    source = sorted(draw(ids)[:count]) if draw(st.booleans()) else list(draw(ids))[:count]
    if draw(st.booleans()):
        destination = sorted(destination)
    return source, destination, last


@settings(max_examples=150, deadline=None)
@given(pairs=page_pairs())
def test_runs_are_the_same_pairs_and_cannot_be_fewer(
    pairs: tuple[list[int], list[int], int],
) -> None:
    source, destination, _ = pairs
    runs = merge_pages(pages(source), pages(destination))
    unrolled = [
        (int(s) + i, int(d) + i)
        for s, d, n in zip(runs.source_start, runs.destination_start, runs.length, strict=True)
        for i in range(n)
    ]
    assert sorted(unrolled) == sorted(zip(source, destination, strict=True))
    wanted = set(zip(source, destination, strict=True))
    assert runs.count == sum((s - 1, d - 1) not in wanted for s, d in wanted)
    assert runs.pages == len(source)


@settings(max_examples=100, deadline=None)
@given(
    pairs=page_pairs(),
    page_bytes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    spare=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_the_bytes_are_those_of_a_copy_page_by_page(
    pairs: tuple[list[int], list[int], int], page_bytes: list[int], spare: int, seed: int
) -> None:
    source, destination, last = pairs
    where = areas(tuple(page_bytes), last, last + spare)
    rng = np.random.default_rng(seed)
    local = rng.integers(0, 256, sum(page_bytes) * (last + 1)).astype(np.uint8)
    remote = rng.integers(0, 256, sum(page_bytes) * (last + spare + 1)).astype(np.uint8)
    runs = expand(
        merge_pages(pages(source), pages(destination)), where, local_region="l", remote_region="r"
    )
    expected = remote.copy()
    before = 0
    for size in page_bytes:
        local_area = local[before * (last + 1) :][: size * (last + 1)].reshape(-1, size)
        start = before * (last + spare + 1)
        for s, d in zip(source, destination, strict=True):
            expected[start + d * size : start + (d + 1) * size] = local_area[s]
        before += size
    np.testing.assert_array_equal(copied(runs, local, remote), expected)
    assert runs.total_bytes == sum(page_bytes) * len(source)


def test_adjacent_on_both_sides_is_one_run_whatever_the_order() -> None:
    runs = merge_pages(pages([5, 3, 4, 9]), pages([25, 23, 24, 26]))
    assert runs.source_start.tolist() == [3, 9]
    assert runs.destination_start.tolist() == [23, 26]
    assert runs.length.tolist() == [3, 1]


def test_adjacent_on_one_side_only_does_not_merge() -> None:
    assert merge_pages(pages([1, 2, 3]), pages([1, 5, 9])).count == 3
    assert merge_pages(pages([1, 5, 9]), pages([1, 2, 3])).count == 3
    assert merge_pages(pages([3, 2, 1]), pages([7, 8, 9])).count == 3


def test_no_pages_are_no_runs() -> None:
    runs = merge_pages(pages([]), pages([]))
    assert (runs.count, runs.pages) == (0, 0)
    where = areas((2, 3), 4, 4)
    assert expand(runs, where, local_region="l", remote_region="r").count == 0


@pytest.mark.parametrize(
    ("source", "destination", "named"),
    [
        ([1, 2], [3], "do not pair up"),
        ([0], [3], "page that is none: 0"),
        ([1], [-2], "page that is none: -2"),
        ([1, 2], [3, 3], "land on one: 3"),
    ],
)
def test_pairs_that_would_lose_bytes_are_refused(
    source: list[int], destination: list[int], named: str
) -> None:
    with pytest.raises(LayoutError, match=named):
        merge_pages(pages(source), pages(destination))


@pytest.mark.parametrize(
    ("source", "destination", "named"),
    [([4, 5], [1, 2], "source page outside"), ([1, 2], [6, 7], "destination page outside")],
)
def test_a_page_past_its_pool_is_refused_before_it_becomes_another_layers_address(
    source: list[int], destination: list[int], named: str
) -> None:
    where = areas((10, 10), 4, 6)
    with pytest.raises(LayoutError, match=named):
        expand(
            merge_pages(pages(source), pages(destination)),
            where,
            local_region="l",
            remote_region="r",
        )


def test_byte_offsets_do_not_wrap_at_32_bits() -> None:
    where = areas((147_456,), 1 << 30, 1 << 30)
    runs = expand(
        merge_pages(pages([1 << 30]), pages([(1 << 30) - 1])),
        where,
        local_region="l",
        remote_region="r",
    )
    assert runs.local_offset_bytes.tolist() == [147_456 << 30]


def test_latent_and_index_pages_of_every_layer_follow_one_plan() -> None:
    spec = KVPoolSpec(
        latent_format("fp32", kv_lora_rank=8, qk_rope_head_dim=4, page_size=4),
        index_format("fp32", index_head_dim=4, page_size=4),
        num_layers=3,
        index_layers=(0, 2),
    )
    where = PageAreas.between(spec, 10, 20)
    runs = expand(
        merge_pages(pages([2, 3]), pages([7, 8])), where, local_region="l", remote_region="r"
    )
    assert runs.count == 3 + 2
    assert runs.total_bytes == 2 * spec.bytes_per_page
    assert runs.local_offset_bytes.tolist() == [
        spec.page_offset_bytes(kind, layer, 10) + 2 * spec.page_bytes(kind)
        for kind in ("latent", "index")
        for layer in spec.layers(kind)
    ]
    assert runs.remote_offset_bytes.tolist() == [
        spec.page_offset_bytes(kind, layer, 20) + 7 * spec.page_bytes(kind)
        for kind in ("latent", "index")
        for layer in spec.layers(kind)
    ]


def descriptors_of_all_ranks(cp_size: int, request_pages: int, destinations: PhysicalPages) -> int:
    """Descriptors a layer of a prompt whose logical pages are consecutive."""
    logical = LogicalPages(np.arange(1, request_pages + 1, dtype=np.int64))
    total = 0
    for rank in range(cp_size):
        layout = CpSharedKVLayout(64, cp_size, rank)
        sources, positions = layout.filter_owned_pages(
            logical, Positions(np.arange(request_pages, dtype=np.int64))
        )
        total += merge_pages(sources, PhysicalPages(destinations[positions])).count
    return total


def test_striped_destinations_need_one_descriptor_a_rank_where_plain_ones_need_one_a_page() -> None:
    free = pages(np.arange(1, 2049))
    assert descriptors_of_all_ranks(8, 2048, free) == 2048
    assert descriptors_of_all_ranks(8, 2048, stripe_destinations(free, 0, 8)) == 8


@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(0, 40),
    first_position=st.integers(0, 20),
    cp_size=st.integers(1, 8),
    stripe_pages=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_striped_destinations_are_the_same_pages_each_once(
    count: int, first_position: int, cp_size: int, stripe_pages: int, seed: int
) -> None:
    free = pages(np.random.default_rng(seed).permutation(100)[:count] + 1)
    striped = stripe_destinations(free, first_position, cp_size, stripe_pages)
    assert sorted(striped.tolist()) == sorted(free.tolist())
    classes = (first_position + np.arange(count)) // stripe_pages % cp_size
    for owner in range(cp_size):
        assert (np.diff(striped[classes == owner]) > 0).all()

"""Pages come from every owner to their places in scratch, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.reads.page_sources import PageSources, fetching_order
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan

POISON = 0xA5
PAGE_SIZE = 16


def make_plan(cp_size: int, physical_pages: int, prefix_pages: int, seed: int) -> ReadPlan:
    layout = CpSharedKVLayout(PAGE_SIZE, cp_size, 0, physical_pages=physical_pages)
    pages = np.random.default_rng(seed).permutation(cp_size * physical_pages) + 1
    prefix = LogicalPages(pages[: prefix_pages + 1])
    return ReadPlan.build(layout, [BatchSpan(prefix, prefix_pages * PAGE_SIZE, 1)])


@pytest.mark.parametrize(("cp_size", "cp_rank"), [(2, 0), (2, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("row_bytes", [1152, 656, 132, 16, 1])
def test_each_page_comes_from_its_owner(
    device: torch.device, cp_size: int, cp_rank: int, row_bytes: int
) -> None:
    from cp_shared_kv.kernels.pull_pages import pull_pages

    physical_pages, layers, page_bytes = 11, 2, row_bytes * PAGE_SIZE
    generator = torch.Generator().manual_seed(cp_size * row_bytes)
    pools = [
        torch.randint(
            0, 256, (layers, physical_pages + 1, page_bytes), dtype=torch.uint8, generator=generator
        ).to(device)
        for _ in range(cp_size)
    ]
    own = pools[cp_rank].data_ptr()
    plan = make_plan(cp_size, physical_pages, prefix_pages=5 * cp_size, seed=row_bytes)
    distances = [pool.data_ptr() - own for pool in pools]
    sources = PageSources.build(plan, cp_rank, distances, page_bytes, device)
    for layer in range(layers):
        scratch = torch.full(
            (plan.scratch_pages, page_bytes), POISON, dtype=torch.uint8, device=device
        )
        pull_pages(pools[cp_rank][layer], sources.sources, sources.order, scratch)
        expected = torch.full_like(scratch, POISON)
        for owner, pool in enumerate(pools):
            pages = plan.owner_range(owner)
            expected[pages] = pool[layer][plan.physical_pages[pages].to(device)]
        assert torch.equal(scratch, expected)


def test_nothing_to_pull_writes_nothing(device: torch.device) -> None:
    from cp_shared_kv.kernels.pull_pages import pull_pages

    plan = make_plan(2, 3, prefix_pages=0, seed=0)
    sources = PageSources.build(plan, 0, [0, 0], 256, device)
    scratch = torch.full((1, 256), POISON, dtype=torch.uint8, device=device)
    pull_pages(torch.zeros_like(scratch), sources.sources, sources.order, scratch)
    assert (scratch == POISON).all()


@pytest.mark.parametrize("lengths", [([0, 8], 256), ([0, 256], 24)])
def test_addresses_that_a_kernel_could_not_use_are_refused(
    lengths: tuple[list[int], int],
) -> None:
    distances, page_bytes = lengths
    with pytest.raises(ConfigError, match="multiples of 16"):
        PageSources.build(make_plan(2, 3, 1, 0), 0, distances, page_bytes, torch.device("cpu"))


def test_owners_take_turns_and_the_neighbour_begins() -> None:
    order = fetching_order(np.array([4, 4, 0, 8]), cp_rank=0)
    assert sorted(order.tolist()) == list(range(16))
    owners = np.repeat([0, 1, 2, 3], [4, 4, 0, 8])[order]
    assert owners[:4].tolist().count(3) == 2
    assert [owner for owner in owners.tolist() if owner != 3][:2] == [1, 0]
    # At no time has one owner given a page more than its share of what has been fetched.
    for taken in range(1, 17):
        for owner, pages in enumerate([4, 4, 0, 8]):
            assert abs((owners[:taken] == owner).sum() - pages * taken / 16) < 2

"""Every rank's pages arrive in every rank's scratch, at the places of the plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan

POISON = 0xA5
PAGE_SIZE = 16


@pytest.mark.parametrize(("cp_size", "prefix_pages"), [(2, 9), (3, 1), (4, 30), (2, 0)])
@pytest.mark.parametrize("row_bytes", [1152, 132, 16])
def test_all_scratches_become_the_prefix(
    device: torch.device, cp_size: int, prefix_pages: int, row_bytes: int
) -> None:
    from cp_shared_kv.kernels.push_pages import push_pages

    physical_pages, page_bytes = 11, row_bytes * PAGE_SIZE
    layout = CpSharedKVLayout(PAGE_SIZE, cp_size, 0, physical_pages=physical_pages)
    pages = np.random.default_rng(row_bytes).permutation(cp_size * physical_pages) + 1
    span = BatchSpan(LogicalPages(pages), prefix_pages * PAGE_SIZE, 1)
    plan = ReadPlan.build(layout, [span])

    def poisoned() -> torch.Tensor:
        shape = (plan.scratch_pages, page_bytes)
        return torch.full(shape, POISON, dtype=torch.uint8, device=device)

    pools = [
        torch.randint(0, 256, (physical_pages + 1, page_bytes), dtype=torch.uint8, device=device)
        for _ in range(cp_size)
    ]
    scratches = [poisoned() for _ in range(cp_size)]
    expected = poisoned()
    for rank, pool in enumerate(pools):
        own = plan.owner_range(rank)
        physical = plan.physical_pages[own].to(device)
        expected[own] = pool[physical]
        distances = [s.data_ptr() - scratches[rank].data_ptr() for s in scratches]
        push_pages(
            pool,
            physical,
            scratches[rank],
            own.start,
            torch.tensor(distances, device=device) // 8,
            rank,
        )
    for scratch in scratches:
        assert torch.equal(scratch, expected)

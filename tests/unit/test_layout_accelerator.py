"""Ids in accelerator memory: never read by the host; below 1 they are padding.

The meta device stands for an accelerator that must not be read: it has no values to read. For
the results, CPU tensors are passed off as accelerator memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cp_shared_kv import CpSharedKVLayout
from cp_shared_kv.layout import checks

LAYOUT = CpSharedKVLayout(page_size=16, cp_size=3, cp_rank=2, stripe_pages=2, physical_pages=8)
METHODS = (
    "owner_for_logical_pages",
    "owned_pages_mask",
    "owned_by_this_rank",
    "logical_pages_to_physical",
    "logical_locs_to_physical",
    "physical_pages_to_logical",
)


@pytest.mark.parametrize("method", METHODS)
def test_values_on_a_device_are_not_read(method: str) -> None:
    ids = torch.zeros(5, dtype=torch.int32, device="meta")
    result = getattr(LAYOUT, method)(ids)
    assert result.device.type == "meta"
    assert result.shape == (5,)


@pytest.fixture
def off_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_is_on_the_host(ids: Any) -> bool:
        return False

    monkeypatch.setattr(checks, "_on_host", nothing_is_on_the_host)


@pytest.mark.usefixtures("off_host")
@pytest.mark.parametrize("stripe_pages", [1, 2, 3])
@pytest.mark.parametrize("cp_size", [1, 3, 4])
def test_ids_below_one_are_padding_on_a_device(cp_size: int, stripe_pages: int) -> None:
    layout = CpSharedKVLayout(16, cp_size, cp_size - 1, stripe_pages)
    below = torch.tensor([0, -1, -2, -16, -17, -(2**40), -(2**63)])
    nothing = [0] * len(below)
    assert layout.owner_for_logical_pages(below).tolist() == [-1] * len(below)
    assert not layout.owned_by_this_rank(below).any()
    assert layout.logical_pages_to_physical(below).tolist() == nothing
    assert layout.logical_locs_to_physical(below).tolist() == nothing
    assert layout.physical_pages_to_logical(below).tolist() == nothing
    assert layout.filter_owned_pages(below, torch.arange(len(below)))[0].tolist() == []


@pytest.mark.usefixtures("off_host")
def test_ids_past_the_pool_pass_on_a_device() -> None:
    assert LAYOUT.owner_for_logical_pages(torch.tensor([1000])).tolist() == [(999 // 2) % 3]

"""Where the tokens of a batch lie in scratch: by page, so that kernels read it like a pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.integrations.sglang.batch import SharedBatch
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.reads.plan import BatchSpan

CPU = torch.device("cpu")


def _layout(rank: int = 0) -> CpSharedKVLayout:
    return CpSharedKVLayout(page_size=4, cp_size=2, cp_rank=rank, physical_pages=8)


def _span(pages: list[int], prefix_len: int, new_len: int) -> BatchSpan:
    return BatchSpan(LogicalPages(np.array(pages, np.int64)), prefix_len, new_len)


def test_prefix_by_owner_then_the_batchs_own_pages_then_padding() -> None:
    # Owners: odd pages are rank 0's. The prefix ends inside page 2.
    batch = SharedBatch.build(_layout(), [_span([4, 7, 2, 9], 10, 5)], CPU)

    assert batch.plan.logical_pages.tolist() == [7, 2, 4]
    assert batch.scratch_pages == 5
    assert [int(batch.page_table[p]) for p in (7, 2, 4, 9, 0, 5)] == [0, 1, 2, 3, 4, 4]
    # Positions 10 and 11 go on in page 2, the others begin page 9.
    assert batch.chunk_slots.tolist() == [6, 7, 12, 13, 14]


def test_tables_keep_shape_and_type() -> None:
    batch = SharedBatch.build(_layout(), [_span([4, 7], 4, 2)], CPU)
    locs = torch.tensor([[16, 19, 28], [29, 0, 40]], dtype=torch.int32)

    in_scratch = batch.locs_in_scratch(locs)

    assert in_scratch.dtype == torch.int32
    # Page 40 // 4 is in no request of the batch, and page 0 in none at all: both read padding.
    assert in_scratch.tolist() == [[0, 3, 4], [5, 8, 8]]


@pytest.mark.parametrize(("rank", "slots", "places"), [(0, [8], [16]), (1, [2, 3], [6, 7])])
def test_a_rank_keeps_the_rows_of_its_pages(rank: int, slots: list[int], places: list[int]) -> None:
    # Page 2 is rank 1's first, page 7 rank 0's fourth.
    spans = [_span([2], 2, 2), _span([4, 7], 4, 1)]
    batch = SharedBatch.build(_layout(rank), spans, CPU)

    assert batch.plan.logical_pages.tolist() == [2, 4]
    assert batch.writes.rows.tolist() == slots
    assert batch.writes.physical_locs.tolist() == places


def test_padding_rows_go_to_the_page_of_padding() -> None:
    batch = SharedBatch.build(_layout(), [_span([1], 0, 3)], CPU)

    assert batch.slots_for(3).tolist() == [0, 1, 2]
    assert batch.slots_for(5).tolist() == [0, 1, 2, 4, 4]


def test_a_page_that_two_requests_write_is_refused() -> None:
    with pytest.raises(LayoutError, match="used a second time"):
        SharedBatch.build(_layout(), [_span([1], 0, 3), _span([1], 0, 2)], CPU)

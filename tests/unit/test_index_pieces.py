"""Index K cut into blocks: every position once, in order, where its key lies."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.reads import index_pieces
from cp_shared_kv.reads.index_pieces import IndexPlan
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan

PIECE = 8


def tokens_of(request: int, span: BatchSpan, page_size: int) -> list[tuple[int, ...]]:
    """What each position of a request is known by: its page and place, or its number when new."""
    return [
        (int(span.logical_pages[p // page_size]), p % page_size)
        if p < span.prefix_len
        else (-1, request, p)
        for p in range(span.total_len)
    ]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_blocks_have_every_position_once_and_no_more_pages_than_fit(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    cp_size = data.draw(st.integers(2, 4))
    sizes = st.tuples(st.integers(0, 50), st.integers(0, 20))
    shapes = data.draw(st.lists(sizes, min_size=1, max_size=4))
    drawn = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(400) + 1
    requests: list[BatchSpan] = []
    for prefix_len, new_len in shapes:
        pages, drawn = np.split(drawn, [-(-(prefix_len + new_len) // page_size)])
        requests.append(BatchSpan(LogicalPages(pages), prefix_len, new_len))
    least = -(-PIECE // page_size) + 1
    most_pages = data.draw(st.integers(least, 30))
    layout = CpSharedKVLayout(page_size, cp_size, 0, physical_pages=400)
    plan = ReadPlan.build(layout, requests)
    with patch.object(index_pieces, "PIECE_TOKENS", PIECE):
        index = IndexPlan.build(layout, requests, plan, most_pages)

    wanted = [tokens_of(r, span, page_size) for r, span in enumerate(requests)]
    new = [t for r, span in enumerate(requests) for t in wanted[r][span.prefix_len :]]
    told: list[list[tuple[int, ...]]] = [[] for _ in requests]
    for block in index.blocks:
        pages = block.pages.logical_pages
        assert len(pages) <= index.room_pages <= max(most_pages, len(plan.logical_pages))
        assert len(index.blocks) == 1 or len(pages) <= most_pages
        in_scratch: dict[int, tuple[int, ...]] = {
            slot: (int(page), offset)
            for place, page in enumerate(pages)
            for offset, slot in enumerate(range(place * page_size, (place + 1) * page_size))
        }
        in_scratch |= dict(zip(index.chunk_slots.tolist(), new, strict=True))
        for piece in block.pieces:
            assert piece.start == len(told[piece.request])
            assert piece.start % PIECE == 0
            told[piece.request] += [in_scratch[slot] for slot in piece.slots.tolist()]
    assert told == wanted


def test_a_prefix_that_fits_is_one_block_of_the_plans_own_slots() -> None:
    layout = CpSharedKVLayout(4, 2, 0, physical_pages=8)
    requests = [BatchSpan(LogicalPages(np.array([3, 1, 2])), 8, 2)]
    plan = ReadPlan.build(layout, requests)
    for most_pages in (None, 2):
        (block,) = IndexPlan.build(layout, requests, plan, most_pages).blocks
        assert block.pages is plan
        assert block.pieces[0].slots is plan.request_slots[0]

"""Cutting a batch into blocks of queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_shared_kv.model.query_blocks import query_blocks


@dataclass(frozen=True)
class Rows:
    start: int
    stop: int
    slots: torch.Tensor


def test_blocks_cover_each_requests_rows_in_order() -> None:
    positions = torch.cat([torch.arange(1000, 1300), torch.arange(5)])
    requests = [
        Rows(0, 300, torch.arange(1300)),
        Rows(300, 300, torch.arange(77)),
        Rows(300, 305, torch.arange(2000, 2005)),
    ]
    first, none, second = query_blocks(requests, positions)
    assert (len(none.slots), none.blocks) == (0, ())
    assert [(b.start, b.stop, b.most_visible) for b in first.blocks] == [
        (0, 128, 1128),
        (128, 256, 1256),
        (256, 300, 1300),
    ]
    assert [(b.start, b.stop, b.most_visible) for b in second.blocks] == [(300, 305, 5)]
    assert second.blocks[0].visible.tolist() == [1, 2, 3, 4, 5]
    assert torch.equal(second.slots, torch.arange(2000, 2005))


def test_slots_end_with_the_last_position_that_a_row_here_sees() -> None:
    (only,) = query_blocks([Rows(0, 2, torch.arange(100))], torch.tensor([3, 40]))
    assert len(only.slots) == 41


def test_a_long_context_takes_fewer_rows_a_block() -> None:
    context = 1 << 20
    slots = torch.arange(1).expand(context)
    positions = torch.arange(context - 40, context)
    (only,) = query_blocks([Rows(0, 40, slots)], positions)
    assert [block.stop - block.start for block in only.blocks] == [16, 16, 8]


def test_no_rows_no_blocks() -> None:
    (only,) = query_blocks([Rows(0, 0, torch.arange(9))], torch.empty(0, dtype=torch.int64))
    assert only.blocks == ()

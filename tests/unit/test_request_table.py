"""Rooms, their pages and the locs of their tokens."""

from __future__ import annotations

import numpy as np
import pytest

from cp_shared_kv.errors import InvariantError, LayoutError
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.request_table import RequestTable


def pages(*ids: int) -> LogicalPages:
    return LogicalPages(np.array(ids, np.int64))


@pytest.fixture
def table() -> RequestTable:
    table = RequestTable(page_size=4)
    table.open(7, pages(9, 3, 5), length_tokens=4)
    return table


def test_a_room_has_its_pages_by_position_until_it_is_closed(table: RequestTable) -> None:
    table.append(7, pages(2))
    assert table.pages(7).tolist() == [9, 3, 5, 2]
    assert list(table.rooms) == [7]
    assert table.close(7).tolist() == [9, 3, 5, 2]
    assert list(table.rooms) == []


def test_locs_follow_the_pages_across_their_borders(table: RequestTable) -> None:
    table.advance(7, 8)
    assert table.logical_locs(7, 2, 9).tolist() == [38, 39, 12, 13, 14, 15, 20]
    assert table.logical_locs(7, 12, 12).tolist() == []


def test_advance_gives_the_locs_of_the_next_tokens(table: RequestTable) -> None:
    assert table.advance(7, 3).tolist() == [12, 13, 14]
    assert table.advance(7, 2).tolist() == [15, 20]
    assert table.length_tokens(7) == 9


def test_locs_are_int64_far_past_2_to_the_31() -> None:
    table = RequestTable(page_size=64)
    table.open(0, pages(2**40), length_tokens=64)
    assert table.logical_locs(0, 63, 64).tolist() == [2**46 + 63]


def test_tokens_past_the_pages_are_refused_and_nothing_is_placed(table: RequestTable) -> None:
    with pytest.raises(LayoutError, match=r"room 7: 4\.\.13; allowed: within 0\.\.12"):
        table.advance(7, 9)
    with pytest.raises(LayoutError):
        table.advance(7, -1)
    assert table.length_tokens(7) == 4


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 5), (5, 5)])
def test_ranges_outside_the_placed_tokens_are_refused(
    table: RequestTable, start: int, stop: int
) -> None:
    with pytest.raises(LayoutError, match=r"allowed: within 0\.\.4"):
        table.logical_locs(7, start, stop)


def test_a_room_opens_once_and_an_unknown_one_is_named(table: RequestTable) -> None:
    with pytest.raises(InvariantError, match="room is open already: 7"):
        table.open(7, pages(1), 0)
    assert table.pages(7).tolist() == [9, 3, 5]
    for call in (table.pages, table.close, table.length_tokens):
        with pytest.raises(InvariantError, match="room is not open: 8"):
            call(8)


def test_a_room_cannot_open_with_more_tokens_than_its_pages_hold() -> None:
    table = RequestTable(page_size=4)
    with pytest.raises(LayoutError):
        table.open(1, pages(1, 2), length_tokens=9)
    assert list(table.rooms) == []


def test_page_lists_cannot_be_changed_from_outside(table: RequestTable) -> None:
    mine = pages(1, 2)
    table.open(8, mine, 0)
    mine[0] = 6
    seen = table.pages(8)
    table.append(8, pages(4))
    assert seen.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        seen[0] = 6


@pytest.mark.parametrize("wrong", [pages(4, 4), pages(0, 1)])
def test_invariants_name_the_room_that_is_wrong(wrong: LogicalPages) -> None:
    table = RequestTable(page_size=4)
    table.open(3, wrong, 0)
    with pytest.raises(InvariantError, match="3"):
        table.check_invariants()

"""Rows and pages as bytes: gather and scatter, whatever the bytes mean."""

from __future__ import annotations

import pytest
import torch

from cp_shared_kv.errors import ConfigError, LayoutError
from cp_shared_kv.memory.page_format import PageFormat

POISON = 0xFF
FORMATS = [
    PageFormat("one section of words", 4, (8,), "a"),
    PageFormat("one section of bytes", 4, (7,), "b"),
    PageFormat("keys then scales", 4, (5, 2), "c"),
    PageFormat("two sections of words", 4, (8, 4), "f"),
    PageFormat("three sections", 3, (4, 1, 8), "d"),
    PageFormat("one token a page", 1, (3, 4), "e"),
]


def poisoned_pages(page_format: PageFormat, pages: int) -> torch.Tensor:
    return torch.full((pages, page_format.page_bytes), POISON, dtype=torch.uint8)


def random_rows(page_format: PageFormat, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    size = (count, page_format.row_bytes)
    return torch.randint(0, 255, size, dtype=torch.uint8, generator=generator)


def row_by_hand(page_format: PageFormat, page: torch.Tensor, offset: int) -> list[int]:
    """The token's part of each section, byte by byte from the definition."""
    row: list[int] = []
    section_start = 0
    for width in page_format.sections:
        start = section_start + offset * width
        row += page[start : start + width].tolist()
        section_start += width * page_format.page_size
    return row


@pytest.mark.parametrize("page_format", FORMATS, ids=lambda f: f.name)
def test_scattered_rows_lie_where_the_definition_says_and_nothing_else_changes(
    page_format: PageFormat,
) -> None:
    pages = poisoned_pages(page_format, 5)
    size = page_format.page_size
    # The last slot of one page and the first of the next, out of order; page 0 is padding.
    slots = torch.tensor([4 * size, 2 * size - 1, 2 * size, 5 * size - 1]).unique()[[-1, 0, 1]]
    rows = random_rows(page_format, len(slots))
    page_format.scatter_rows(pages, slots, rows)
    written = {int(slot): row.tolist() for slot, row in zip(slots, rows, strict=True)}
    for slot in range(5 * size):
        expected = written.get(slot, [POISON] * page_format.row_bytes)
        assert row_by_hand(page_format, pages[slot // size], slot % size) == expected
    assert (pages[0] == POISON).all()


@pytest.mark.parametrize("page_format", FORMATS, ids=lambda f: f.name)
def test_gather_returns_what_scatter_wrote_in_any_order_and_twice(page_format: PageFormat) -> None:
    pages = poisoned_pages(page_format, 4)
    slots = torch.arange(page_format.page_size, 4 * page_format.page_size)
    rows = random_rows(page_format, len(slots))
    page_format.scatter_rows(pages, slots, rows)
    order = torch.tensor([2, 0, 0, 1])
    assert torch.equal(page_format.gather_rows(pages, slots[order]), rows[order])
    before = pages.clone()
    page_format.gather_rows(pages, slots)[:] = 0
    assert torch.equal(pages, before), "a gathered row is a copy"


@pytest.mark.parametrize("page_format", FORMATS, ids=lambda f: f.name)
def test_no_slots_are_no_rows(page_format: PageFormat) -> None:
    pages = poisoned_pages(page_format, 2)
    none = torch.empty(0, dtype=torch.int64)
    page_format.scatter_rows(pages, none, random_rows(page_format, 0))
    assert page_format.gather_rows(pages, none).shape == (0, page_format.row_bytes)
    assert (pages == POISON).all()


def test_rows_cut_out_of_wider_rows_are_scattered_like_any_others() -> None:
    page_format = PageFormat("words", 2, (8,), "a")
    pages = poisoned_pages(page_format, 2)
    wide = torch.arange(40, dtype=torch.uint8).view(2, 20)
    page_format.scatter_rows(pages, torch.tensor([3, 1]), wide[:, 4:12])
    assert pages[1, 8:].tolist() == wide[0, 4:12].tolist()
    assert pages[0, 8:].tolist() == wide[1, 4:12].tolist()


@pytest.mark.parametrize("page_format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize(("row_start", "page_start"), [(1, 0), (0, 2), (2, 3)])
def test_rows_and_pages_may_begin_at_any_byte(
    page_format: PageFormat, row_start: int, page_start: int
) -> None:
    wide = random_rows(PageFormat("", 1, (page_format.row_bytes + 5,), ""), 3)
    rows = wide[:, row_start : row_start + page_format.row_bytes]
    buffer = torch.full((page_start + 2 * page_format.page_bytes,), POISON, dtype=torch.uint8)
    pages = buffer[page_start:].view(2, -1)
    slots = torch.tensor([1, 0, page_format.page_size])
    if page_format.page_size == 1:
        slots, rows = slots[:2], rows[:2]
    page_format.scatter_rows(pages, slots, rows)
    assert torch.equal(page_format.gather_rows(pages, slots), rows)
    for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
        page, offset = divmod(slot, page_format.page_size)
        assert row_by_hand(page_format, pages[page], offset) == row


@pytest.mark.parametrize("page_format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize(
    "slots",
    [torch.tensor([1], dtype=torch.int32), torch.tensor([1.0]), torch.tensor([[1]])],
    ids=["int32 wraps past 2^31", "not a number of a slot", "not one-dimensional"],
)
def test_slots_are_one_row_of_int64_or_refused(
    page_format: PageFormat, slots: torch.Tensor
) -> None:
    pages = poisoned_pages(page_format, 2)
    with pytest.raises(LayoutError, match=r"slots: .* allowed: int64\[n\]"):
        page_format.gather_rows(pages, slots)
    with pytest.raises(LayoutError, match=r"slots: .* allowed: int64\[n\]"):
        page_format.scatter_rows(pages, slots, random_rows(page_format, 1))


def test_rows_of_another_shape_are_refused_with_both_shapes() -> None:
    page_format = FORMATS[0]
    with pytest.raises(LayoutError, match=r"\(2, 8\); allowed: \(1, 8\)"):
        page_format.scatter_rows(
            poisoned_pages(page_format, 1), torch.tensor([0]), random_rows(page_format, 2)
        )


def test_slot_outside_the_pages_is_an_error_and_not_a_write_elsewhere() -> None:
    for page_format in FORMATS:
        pages = poisoned_pages(page_format, 2)
        outside = torch.tensor([2 * page_format.page_size])
        with pytest.raises((IndexError, RuntimeError)):
            page_format.scatter_rows(pages, outside, random_rows(page_format, 1))
        with pytest.raises((IndexError, RuntimeError)):
            page_format.gather_rows(pages, outside)


@pytest.mark.parametrize(("page_size", "sections"), [(0, (4,)), (4, ()), (4, (4, 0))])
def test_formats_without_bytes_are_refused(page_size: int, sections: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        PageFormat("empty", page_size, sections, "")

"""Tables on terminals that are too narrow: words may wrap, a figure is never cut."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table


def short_count(count: int) -> str:
    """A number of tokens in at most five digits: 9,216, 812 k or 2,357 M."""
    if count < 10_000:
        return f"{count:,}"
    return f"{count / 1e3:,.0f} k" if count < 10_000_000 else f"{count / 1e6:,.0f} M"


def print_whole(table: Table, console: Console) -> None:
    """Print a table whose figures stay whole, if need be in lines longer than the terminal's.

    Columns justified to the right hold figures; headings and all other columns may wrap.
    """
    for column in table.columns:
        figures = column.justify == "right"
        cells = [str(cell) for cell in column.cells]
        words = [word for text in (str(column.header), *cells) for word in text.split()]
        column.no_wrap = False
        column.min_width = max(map(cell_len, [*words, *cells] if figures else words), default=0)
    console.print(table, crop=False)

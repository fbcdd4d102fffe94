"""Rooms and the logical pages they hold: page lists, lengths in tokens, locs of token ranges."""

from __future__ import annotations

from collections.abc import KeysView
from dataclasses import dataclass

import numpy as np

from cp_shared_kv.errors import InvariantError, LayoutError
from cp_shared_kv.layout.pages import LogicalLocs, LogicalPages


@dataclass(slots=True)
class _Row:
    logical_pages: LogicalPages  # read-only, so that callers may keep it
    length_tokens: int


class RequestTable:
    """For each open room its logical pages by position and how many tokens it has placed there.

    Invariants, proved by `check_invariants`: a room's length is within its pages; no page is
    the padding page or twice in one room.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._rows: dict[int, _Row] = {}

    @property
    def rooms(self) -> KeysView[int]:
        """The open rooms, in the order in which they were opened."""
        return self._rows.keys()

    def open(self, room: int, logical_pages: LogicalPages, length_tokens: int) -> None:
        """Start a room with pages of which the first `length_tokens` tokens are placed."""
        self.refuse_open(room)
        self._check_range(room, 0, length_tokens, len(logical_pages) * self.page_size)
        self._rows[room] = _Row(_read_only(logical_pages.copy()), length_tokens)

    def append(self, room: int, logical_pages: LogicalPages) -> None:
        """Put more pages at the end of a room's list."""
        row = self._row(room)
        row.logical_pages = _read_only(np.concatenate([row.logical_pages, logical_pages]))

    def advance(self, room: int, token_count: int) -> LogicalLocs:
        """Place the room's next tokens and return their logical locs, i64[token_count].

        Raises LayoutError, and places nothing, when the room's pages have no place for them.
        """
        row = self._row(room)
        start, stop = row.length_tokens, row.length_tokens + token_count
        self._check_range(room, start, stop, len(row.logical_pages) * self.page_size)
        row.length_tokens = stop
        return self.logical_locs(room, start, stop)

    def close(self, room: int) -> LogicalPages:
        """Forget a room. Returns the pages it held."""
        pages = self._row(room).logical_pages
        del self._rows[room]
        return pages

    def pages(self, room: int) -> LogicalPages:
        """A room's logical pages by position: read-only, and never changed later."""
        return self._row(room).logical_pages

    def length_tokens(self, room: int) -> int:
        return self._row(room).length_tokens

    def logical_locs(self, room: int, start_token: int, stop_token: int) -> LogicalLocs:
        """Logical locs of the room's tokens start..stop-1, i64[stop - start].

        Raises LayoutError unless 0 <= start <= stop <= the room's length.
        """
        row = self._row(room)
        self._check_range(room, start_token, stop_token, row.length_tokens)
        page, offset = np.divmod(np.arange(start_token, stop_token), self.page_size)
        return LogicalLocs(row.logical_pages[page] * self.page_size + offset)

    def refuse_open(self, room: int) -> None:
        """Raises InvariantError when the room is open already."""
        if room in self._rows:
            raise InvariantError(
                "room is open already", value=room, change="release it first, or use another id"
            )

    def check_invariants(self) -> None:
        """Raises InvariantError naming the first room whose row is wrong."""
        for room, row in self._rows.items():
            if not 0 <= row.length_tokens <= len(row.logical_pages) * self.page_size:
                raise InvariantError("request table: length is outside the pages", value=room)
            if (row.logical_pages < 1).any():
                raise InvariantError("request table: a room holds the padding page", value=room)
            if len(np.unique(row.logical_pages)) != len(row.logical_pages):
                raise InvariantError("request table: a room holds a page twice", value=room)

    def _row(self, room: int) -> _Row:
        try:
            return self._rows[room]
        except KeyError:
            raise InvariantError(
                "room is not open", value=room, change="admit it first; a room is released once"
            ) from None

    def _check_range(self, room: int, start_token: int, stop_token: int, limit: int) -> None:
        if not 0 <= start_token <= stop_token <= limit:
            raise LayoutError(
                f"token range outside room {room}",
                value=f"{start_token}..{stop_token}",
                allowed=f"within 0..{limit}",
            )


def _read_only(pages: np.ndarray) -> LogicalPages:
    pages.setflags(write=False)
    return LogicalPages(pages)

"""The destination pages that decode has set aside for one room."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.layout.pages import PhysicalPages, Positions


@dataclass(frozen=True, eq=False)
class Reservation:
    """Where each page of a prompt that decode does not hold yet will land.

    `first_position`: pages of the prompt that decode already holds; the reservation begins
    behind them. `physical_pages`: decode's page for position `first_position + i` at index i,
    int64, none of them the padding page, none twice. May be empty. ProtocolError otherwise.
    """

    first_position: int
    physical_pages: PhysicalPages

    def __post_init__(self) -> None:
        if self.first_position < 0:
            raise ProtocolError(
                "reservation begins before the prompt", value=self.first_position, allowed=">= 0"
            )
        pages = self.physical_pages
        if pages.ndim != 1 or pages.dtype != np.int64:
            raise ProtocolError(
                "reservation pages are not a list of page ids",
                value=f"{pages.ndim}-D {pages.dtype}",
                allowed="1-D int64",
            )
        if pages.size and pages.min() < 1:
            raise ProtocolError(
                "reservation holds a page that is not one", value=int(pages.min()), allowed=">= 1"
            )
        ordered = np.sort(pages)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        if twice.size:
            raise ProtocolError("reservation holds a page twice", value=int(twice[0]))

    @property
    def size(self) -> int:
        """Positions to fill."""
        return len(self.physical_pages)

    @property
    def total_positions(self) -> int:
        """Pages of the whole prompt, those that decode already holds included."""
        return self.first_position + self.size

    def check_within(self, physical_pages: int) -> None:
        """Raise ProtocolError if a page lies past the last of decode's pool of that many pages.

        Call it on every reservation that was received, with the figure of decode's Hello: a
        page past the end of one layer would be a valid address in the next.
        """
        if self.size and int(self.physical_pages.max()) > physical_pages:
            raise ProtocolError(
                "reservation names a page outside decode's pool",
                value=int(self.physical_pages.max()),
                allowed=f"1 to {physical_pages}",
            )

    def destinations(self, positions: Positions) -> PhysicalPages:
        """Decode's pages for positions relative to the reservation, each in 0..size-1."""
        return PhysicalPages(self.physical_pages[positions])

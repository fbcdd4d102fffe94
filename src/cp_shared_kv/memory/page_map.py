"""The pages of a pool by owner, by range of physical pages and by state: what a heat map shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from cp_shared_kv.layout.checks import check_whole_number


@dataclass(frozen=True)
class PageMap:
    """How many pages are in each state, i64[N, bins] each.

    Bin b counts the physical pages b * `pages_per_bin` + 1 to (b + 1) * `pages_per_bin` of an
    owner; the last bin may be shorter. In each bin the three add up to the pages of the bin.
    """

    physical_pages: int
    pages_per_bin: int
    free: npt.NDArray[np.int64]
    cached: npt.NDArray[np.int64]
    """Kept for their prefix alone: they are evicted when room is needed."""
    locked: npt.NDArray[np.int64]
    """Held by a room."""

    @classmethod
    def of(
        cls,
        free: npt.NDArray[np.bool_],
        cached: npt.NDArray[np.bool_],
        most_bins: int,
    ) -> Self:
        """Count bool[N, P] in bins of one size, the smallest that gives at most `most_bins`.

        A page that is neither free nor cached is locked. LayoutError for `most_bins` below one.
        """
        check_whole_number("most_bins", most_bins, at_least=1)
        physical_pages = free.shape[1]
        pages_per_bin = -(-physical_pages // most_bins)
        starts = np.arange(0, physical_pages, pages_per_bin)

        def counted(pages: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
            return np.add.reduceat(pages, starts, axis=1, dtype=np.int64)

        return cls(
            physical_pages, pages_per_bin, counted(free), counted(cached), counted(~free & ~cached)
        )

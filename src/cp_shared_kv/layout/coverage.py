"""The proof that every page of a room arrived, each exactly once, whoever sent it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.layout.checks import as_int64, check_whole_number
from cp_shared_kv.layout.pages import Positions


class ExactCover:
    """Which of the positions 0..size-1 have been covered, and by whom.

    Positions count from the reservation's first page. Not collective: the receiver holds one
    for each room. `size` 0 is complete from the start.
    """

    def __init__(self, size: int) -> None:
        check_whole_number("size", size, at_least=0)
        self.size = size
        self._sources: list[str] = []
        # Index into _sources of the one that covered the position; -1 where none has.
        self._covered_by = np.full(size, -1, dtype=np.int64)
        self._count = 0

    def add(self, positions: npt.NDArray[np.int64], source: str) -> None:
        """Cover a 1-D array of positions, in any order, on the word of `source`.

        LayoutError that names the positions outside 0..size-1, or else those that are doubled,
        within the array or with an earlier one. The cover is then as it was before the call.
        """
        arrived = as_int64("position", positions)
        if arrived.ndim != 1:
            raise LayoutError(
                f"positions from {source} are not a list",
                value=f"shape {arrived.shape}",
                allowed="a 1-D array",
                change="flatten them",
            )
        self._check_inside(arrived, source)
        self._check_new(arrived, source)
        self._covered_by[arrived] = len(self._sources)
        self._sources.append(source)
        self._count += len(arrived)

    @property
    def count(self) -> int:
        """How many positions are covered."""
        return self._count

    @property
    def complete(self) -> bool:
        """Whether every position is covered."""
        return self._count == self.size

    def missing(self) -> Positions:
        """The positions that nobody has covered, ascending."""
        return Positions(np.flatnonzero(self._covered_by < 0))

    def _check_inside(self, arrived: npt.NDArray[np.int64], source: str) -> None:
        outside = arrived[(arrived < 0) | (arrived >= self.size)]
        if len(outside):
            raise LayoutError(
                f"positions from {source} outside the reservation",
                value=_listed(outside),
                allowed=f"0..{self.size - 1}" if self.size else "none: it has no pages",
                change="send positions relative to the reservation's first page",
            )

    def _check_new(self, arrived: npt.NDArray[np.int64], source: str) -> None:
        distinct, times = np.unique(arrived, return_counts=True)
        doubled = distinct[(times > 1) | (self._covered_by[distinct] >= 0)]
        if len(doubled):
            earlier = int(self._covered_by[doubled[0]])
            first_source = source if earlier < 0 else self._sources[earlier]
            raise LayoutError(
                f"positions from {source} sent twice, the first of them by {first_source} before",
                value=_listed(doubled),
                allowed="each position once",
                change="send each page in one chunk, from the rank that owns it",
            )


def _listed(positions: npt.NDArray[np.int64], limit: int = 8) -> str:
    """The first positions in words; a message stays readable when thousands are wrong."""
    shown = ", ".join(str(position) for position in positions[:limit].tolist())
    return shown if len(positions) <= limit else f"{shown} and {len(positions) - limit} more"

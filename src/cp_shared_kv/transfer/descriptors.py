"""From pairs of pages to byte ranges: as few as possible, in every layer and kind by one plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.transfer.transport import Runs

if TYPE_CHECKING:
    from cp_shared_kv.memory.page_format import PageKind
    from cp_shared_kv.memory.pool import KVPoolSpec


@dataclass(frozen=True, eq=False)
class PageRuns:
    """Runs of pages that are adjacent on both sides: int64[count] each, ascending by source."""

    source_start: npt.NDArray[np.int64]
    destination_start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]

    @property
    def count(self) -> int:
        """Descriptors a layer and kind."""
        return len(self.length)

    @property
    def pages(self) -> int:
        """Pages in all runs together."""
        return int(self.length.sum())


def merge_pages(
    source_physical_pages: PhysicalPages, destination_physical_pages: PhysicalPages
) -> PageRuns:
    """The fewest runs that copy page `source[i]` onto page `destination[i]`, for each i.

    int64[pages] each, in any order. LayoutError when the lengths differ, a page is the padding
    page or less, or a destination occurs twice (one of its two sources would be lost).
    """
    source = np.asarray(source_physical_pages)
    destination = np.asarray(destination_physical_pages)
    if source.ndim != 1 or source.shape != destination.shape:
        raise LayoutError(
            "source and destination pages do not pair up",
            value=f"{source.shape} and {destination.shape}",
            allowed="two lists of one length",
        )
    if source.size == 0:
        empty = np.empty(0, dtype=np.int64)
        return PageRuns(empty, empty, empty)
    lowest = min(int(source.min()), int(destination.min()))
    if lowest < 1:
        raise LayoutError("transfer of a page that is none", value=lowest, allowed=">= 1")
    by_destination = np.sort(destination)
    twice = by_destination[1:][by_destination[1:] == by_destination[:-1]]
    if twice.size:
        raise LayoutError("two pages would land on one", value=int(twice[0]))
    order = np.lexsort((destination, source))
    source, destination = source[order], destination[order]
    breaks = (np.diff(source) != 1) | (np.diff(destination) != 1)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1]).astype(np.int64)
    length = np.diff(starts, append=len(source))
    return PageRuns(source[starts], destination[starts], length)


@dataclass(frozen=True, eq=False)
class PageAreas:
    """Where the pages of each layer and kind begin in the two pools: int64[areas] each.

    Both pools hold the same areas with the same page sizes; they may differ in page count.
    """

    local_base_bytes: npt.NDArray[np.int64]
    remote_base_bytes: npt.NDArray[np.int64]
    page_bytes: npt.NDArray[np.int64]
    local_physical_pages: int
    remote_physical_pages: int

    @classmethod
    def between(
        cls, spec: KVPoolSpec, local_physical_pages: int, remote_physical_pages: int
    ) -> PageAreas:
        """The areas of two pools of one spec, latent and index alike. Once a peer."""
        kinds: tuple[PageKind, ...] = ("latent", "index")
        areas: list[tuple[PageKind, int]] = []
        for kind in kinds:
            areas.extend((kind, layer) for layer in spec.layers(kind))

        def bases(physical_pages: int) -> npt.NDArray[np.int64]:
            offsets = [spec.page_offset_bytes(*area, physical_pages) for area in areas]
            return np.array(offsets, dtype=np.int64)

        return cls(
            bases(local_physical_pages),
            bases(remote_physical_pages),
            np.array([spec.page_bytes(kind) for kind, _ in areas], dtype=np.int64),
            local_physical_pages,
            remote_physical_pages,
        )


def expand(runs: PageRuns, areas: PageAreas, *, local_region: str, remote_region: str) -> Runs:
    """Byte ranges for the page runs in every area: areas * runs of them, area by area.

    LayoutError when a page lies past the end of its pool: its address would be another layer's.
    """
    _check_last("source", runs.source_start, runs.length, areas.local_physical_pages)
    _check_last("destination", runs.destination_start, runs.length, areas.remote_physical_pages)
    page_bytes = areas.page_bytes[:, None]
    return Runs(
        local_region=local_region,
        remote_region=remote_region,
        local_offset_bytes=(
            areas.local_base_bytes[:, None] + runs.source_start * page_bytes
        ).ravel(),
        remote_offset_bytes=(
            areas.remote_base_bytes[:, None] + runs.destination_start * page_bytes
        ).ravel(),
        nbytes=(runs.length * page_bytes).ravel(),
    )


def stripe_destinations(
    physical_pages: PhysicalPages, first_position: int, cp_size: int, stripe_pages: int = 1
) -> PhysicalPages:
    """Which of decode's free pages each position gets, so that a sender's pages lie together.

    Owners take turns along a prompt: positions N stripes apart have the same owner. Each such
    class gets ascending pages, so that rank's adjacent source pages merge into long runs where
    pages in order of position would not merge at all. Any assignment is correct; this one needs
    the fewest descriptors as long as the owners do take turns.

    `physical_pages`: int64[pages], any free pages. Returns them by position - first_position.
    """
    positions = first_position + np.arange(len(physical_pages), dtype=np.int64)
    owner_class = positions // stripe_pages % cp_size
    by_position = np.empty(len(physical_pages), dtype=np.int64)
    by_position[np.argsort(owner_class, kind="stable")] = np.sort(physical_pages)
    return PhysicalPages(by_position)


def _check_last(
    side: str,
    start: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
    physical_pages: int,
) -> None:
    past = start > physical_pages + 1 - length
    if past.any():
        raise LayoutError(
            f"{side} page outside its pool",
            value=f"{int(length[past][0])} pages from {int(start[past][0])}",
            allowed=f"1 to {physical_pages}",
        )

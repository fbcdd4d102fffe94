"""What a test computes: requests, and the batches that bring their tokens in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec


class PlannedRequest(msgspec.Struct, frozen=True):
    """A request by its tokens; its first `shared_pages` pages are those of request `shares`."""

    token_ids: list[int]
    shares: int = 0
    shared_pages: int = 0


class Span(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of a request, computed in one batch; those before are cached."""

    request: int
    start: int
    stop: int

    def tokens_of(self, requests: Sequence[PlannedRequest]) -> list[int]:
        """The token ids that this span computes."""
        return requests[self.request].token_ids[self.start : self.stop]


class Schedule(msgspec.Struct, frozen=True):
    """Requests and batches, in the order they run. Travels as JSON."""

    page_size: int
    requests: list[PlannedRequest]
    batches: list[list[Span]]

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Every (request, position) that is computed, each once, sorted."""
        return sorted(
            (span.request, position)
            for batch in self.batches
            for span in batch
            for position in range(span.start, span.stop)
        )


def in_chunks(request: int, start: int, sizes: Sequence[int], stop: int) -> list[list[Span]]:
    """Batches of one request alone: chunks of these sizes, over and over, from start to stop."""
    bounds = [start]
    while bounds[-1] < stop:
        size = sizes[(len(bounds) - 1) % len(sizes)]
        bounds.append(min(bounds[-1] + size, stop))
    return [[Span(request, first, last)] for first, last in pairwise(bounds)]

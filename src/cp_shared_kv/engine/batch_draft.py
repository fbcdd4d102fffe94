"""Who takes part in the next batch of a prefill group, while it is being chosen. No I/O."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cp_shared_kv.engine.request import PrefillRequest
from cp_shared_kv.memory.prefix_cache import common_pages, key_rows


class BatchDraft:
    """Who takes part in one batch, with how many new tokens, while tokens and scratch last.

    A batch computes at most `chunk_tokens` new tokens, on top of at most `max_prefix_pages` prefix
    pages; one request alone may always run.
    """

    def __init__(self, chunk_tokens: int, max_prefix_pages: int) -> None:
        self.chosen: list[tuple[PrefillRequest, int]] = []
        self._tokens_left = chunk_tokens
        self._max_prefix_pages = max_prefix_pages
        self._prefixes: list[npt.NDArray[np.int64]] = []

    def has_room_after(self, rooms: list[int]) -> bool:
        """Whether all of these take part and there are tokens for one more."""
        return len(self.chosen) == len(rooms) and self._tokens_left > 0

    def holds_whole(self, new_tokens: int, prefix_pages: int) -> bool:
        """Whether there is room for all of a request, wherever its prefix lies."""
        held_pages = sum(map(len, self._prefixes))
        return (
            new_tokens <= self._tokens_left and held_pages + prefix_pages <= self._max_prefix_pages
        )

    def computes(self, page_keys: npt.NDArray[np.void], page_size: int) -> bool:
        """Whether all of these leading pages of a prompt are some other's that takes part, and have
        their KV once this batch is done."""
        wanted = key_rows(page_keys)
        pages = len(wanted)
        for request, take in self.chosen:
            if pages > (request.computed_tokens + take) // page_size:
                continue
            theirs = key_rows(request.page_keys[:pages])
            # Prompts that differ mostly do so in the last of the pages, too.
            if np.array_equal(wanted[-1:], theirs[-1:]) and common_pages(wanted, theirs) == pages:
                return True
        return False

    def add_what_fits(self, request: PrefillRequest, prefix_pages: npt.NDArray[np.int64]) -> None:
        """Take as much of a request as fits; nothing if its prefix would overflow scratch."""
        if not self._tokens_left or not self._holds(prefix_pages):
            return
        self._prefixes.append(prefix_pages)
        take = min(self._tokens_left, request.remaining_tokens)
        self._tokens_left -= take
        self.chosen.append((request, take))

    def _holds(self, prefix_pages: npt.NDArray[np.int64]) -> bool:
        if not self.chosen:
            return True
        if sum(map(len, self._prefixes)) + len(prefix_pages) <= self._max_prefix_pages:
            return True
        # Pages that several prefixes share lie in scratch once. Sorted only when it matters.
        distinct = np.unique(np.concatenate(self._prefixes))
        self._prefixes = [distinct]
        return len(np.union1d(distinct, prefix_pages)) <= self._max_prefix_pages

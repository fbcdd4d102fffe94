"""How much of the prompts of the last minute the prefix cache held. No I/O; time is passed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from cp_shared_kv.engine.api import PrefillGroupStats

WINDOW_SECONDS = 60.0


class _Sample(NamedTuple):
    at_seconds: float
    prompt_tokens_total: int
    cached_tokens_total: int


class RecentPrompts:
    """Totals of each group over the last minute, for their growth.

    By group, since one that is being started again is missing from the figures for a while.
    """

    def __init__(self) -> None:
        self._samples: dict[int, deque[_Sample]] = {}

    def observe(self, groups: Iterable[PrefillGroupStats], now_seconds: float) -> None:
        """Keep these totals, and of what is older than the window only the youngest."""
        for group in groups:
            samples = self._samples.setdefault(group.index, deque())
            samples.append(
                _Sample(now_seconds, group.prompt_tokens_total, group.cached_tokens_total)
            )
            while len(samples) > 1 and samples[1].at_seconds <= now_seconds - WINDOW_SECONDS:
                samples.popleft()

    def tokens(self) -> tuple[int, int]:
        """Prompt tokens of the window, and those of them that the cache held."""
        spans = [(samples[0], samples[-1]) for samples in self._samples.values()]
        return (
            sum(last.prompt_tokens_total - first.prompt_tokens_total for first, last in spans),
            sum(last.cached_tokens_total - first.cached_tokens_total for first, last in spans),
        )

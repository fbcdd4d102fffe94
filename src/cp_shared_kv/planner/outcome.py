"""What a simulation found, counted as it runs: a few numbers a request, whatever its length."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.planner.simulated_request import SimulatedRequest

QUANTILES = (50, 90, 99)


def _doubles() -> array[float]:
    return array("d")


@dataclass
class Outcome:
    """Counts and samples of one run. Seconds are of the simulated clock, but for `cpu_seconds`."""

    short_tokens: int = 0
    """Requests with at most so many tokens to compute are counted once more on their own."""
    requests: int = 0
    refused: dict[str, int] = field(default_factory=dict[str, int])
    prompt_tokens: int = 0
    """Of all requests, those refused among them."""
    served_tokens: int = 0
    cached_tokens: int = 0
    evicted_pages: int = 0
    busy_seconds: float = 0.0
    batches: int = 0
    makespan_seconds: float = 0.0
    cpu_seconds: float = 0.0
    queue_seconds: array[float] = field(default_factory=_doubles)
    first_token_seconds: array[float] = field(default_factory=_doubles)
    short_first_token_seconds: array[float] = field(default_factory=_doubles)
    busiest_owner: array[float] = field(default_factory=_doubles)
    least_busiest_owner: array[float] = field(default_factory=_doubles)
    plain_descriptors: array[float] = field(default_factory=_doubles)
    striped_descriptors: array[float] = field(default_factory=_doubles)
    sent_pages: array[float] = field(default_factory=_doubles)

    def refuse(self, prompt_tokens: int, reason: str) -> None:
        """A request that could never fit, and what it exceeds."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def admit(self, layout: CpSharedKVLayout, pages: LogicalPages) -> None:
        """The pages of a request as they were drawn: how evenly they lie."""
        owned = np.bincount(layout.owner_for_logical_pages(pages), minlength=layout.cp_size)
        ideal = len(pages) / layout.cp_size
        self.busiest_owner.append(float(owned.max()) / ideal)
        # Pages that are no multiple of the owners cannot lie evener than this.
        self.least_busiest_owner.append(-(-len(pages) // layout.cp_size) / ideal)

    def serve(self, request: SimulatedRequest, now_seconds: float) -> None:
        """A request whose prompt has reached decode."""
        self.requests += 1
        self.prompt_tokens += request.prompt_tokens
        self.served_tokens += request.prompt_tokens
        self.cached_tokens += request.cached_tokens
        arrived = request.ask.at_seconds
        self.queue_seconds.append(request.admitted_seconds - arrived)
        self.first_token_seconds.append(now_seconds - arrived)
        if request.prompt_tokens - request.cached_tokens <= self.short_tokens:
            self.short_first_token_seconds.append(now_seconds - arrived)
        if request.descriptors_plain:
            self.plain_descriptors.append(request.descriptors_plain)
            self.striped_descriptors.append(request.descriptors_striped)
            self.sent_pages.append(request.sent_pages)

    @property
    def hit_rate(self) -> float:
        """Cached tokens over the prompt tokens of all requests: a refused one has no hit."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_plain(self) -> dict[str, Any]:
        """All figures, percentiles instead of samples."""
        served = self.served_tokens
        return {
            "requests": self.requests,
            "refused": dict(sorted(self.refused.items())),
            "refused_requests": sum(self.refused.values()),
            "hit_rate": round(self.hit_rate, 4),
            "hit_rate_of_served": round(self.cached_tokens / served, 4) if served else 0.0,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": served - self.cached_tokens,
            "saved_tokens": self.cached_tokens,
            "evicted_pages": self.evicted_pages,
            "batches": self.batches,
            "queue_seconds": quantiles(self.queue_seconds),
            "first_token_seconds": quantiles(self.first_token_seconds),
            "short_requests": len(self.short_first_token_seconds),
            "short_first_token_seconds": quantiles(self.short_first_token_seconds),
            "busiest_owner_over_ideal": quantiles(self.busiest_owner),
            "least_possible_busiest_owner": quantiles(self.least_busiest_owner),
            "descriptors": self._descriptors(),
            "makespan_seconds": round(self.makespan_seconds, 3),
            "prefill_busy": round(self.busy_seconds / self.makespan_seconds, 4)
            if self.makespan_seconds
            else 0.0,
            "cpu_seconds": round(self.cpu_seconds, 2),
        }

    def _descriptors(self) -> dict[str, Any] | None:
        """Of each transfer, all ranks and chunks, for one layer and kind of page."""
        if not self.plain_descriptors:
            return None
        return {
            "transfers": len(self.sent_pages),
            "pages": quantiles(self.sent_pages),
            "plain": quantiles(self.plain_descriptors),
            "striped": quantiles(self.striped_descriptors),
            "plain_total": int(sum(self.plain_descriptors)),
            "striped_total": int(sum(self.striped_descriptors)),
            "pages_total": int(sum(self.sent_pages)),
        }


def quantiles(samples: Sequence[float]) -> dict[str, float] | None:
    """Mean, p50, p90, p99 and the largest; None of nothing."""
    if not len(samples):
        return None
    values: npt.NDArray[np.float64] = np.asarray(samples, np.float64)
    found = {"mean": float(values.mean())}
    found |= {f"p{q}": float(np.percentile(values, q)) for q in QUANTILES}
    found["max"] = float(values.max())
    return {name: round(value, 5) for name, value in found.items()}

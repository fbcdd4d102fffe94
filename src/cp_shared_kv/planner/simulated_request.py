"""One request of a simulation on its way from arrival to answer."""

from __future__ import annotations

from dataclasses import dataclass

from cp_shared_kv.planner.arrivals import Ask
from cp_shared_kv.planner.trace_keys import PageKeys


@dataclass(slots=True)
class SimulatedRequest:
    """What it asks for, and what became of it. Times in seconds of the clock.

    Descriptors are those of all ranks and chunks for one layer and kind of page.
    """

    room: int
    ask: Ask
    prompt_tokens: int
    output_tokens: int
    page_keys: PageKeys
    group: int = 0
    admitted_seconds: float = 0.0
    cached_tokens: int = 0
    descriptors_plain: int = 0
    descriptors_striped: int = 0
    sent_pages: int = 0

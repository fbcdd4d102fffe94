"""Hit rates of a plain LRU over the agentic trace: an estimate that shares no code with the pool.

The plain LRU knows no batches, no locks and no tree: a conversation's last prompt is one run of
pages, and the run that was used longest ago loses its tail first. Users of a closed loop get their
answers as in the recording and think as long, at most half an hour. `CPKV_AGENTIC_TRACE` names the
trace; where it is not set, this benchmark is not listed.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import Benchmark, Measurement, Progress
from cp_shared_kv.planner.arrivals import Arrivals, Ask, ClosedLoop
from cp_shared_kv.planner.clock import EventClock
from cp_shared_kv.planner.trace import Trace
from cp_shared_kv.planner.trace_files import read_trace
from cp_shared_kv.planner.trace_keys import PageKeys, TraceKeys

TRACE_VARIABLE = "CPKV_AGENTIC_TRACE"
PAGE_SIZE = 64
PHYSICAL_TOKENS = 237_312
USERS = 16
REQUESTS = 20_000
MULTIPLIERS = (1, 2, 4, 8)
SEEDS = range(5)
LONGEST_THINK_SECONDS = 1800.0
SHORT_THINK_SECONDS = 60.0
"""What the logical_pool benchmark caps thinking at."""
ESTIMATE = {
    8: {1: 0.458, 2: 0.737, 4: 0.911, 8: 0.959},
    16: {1: 0.275, 2: 0.526, 4: 0.793, 8: 0.923},
    32: {1: 0.099, 2: 0.237, 4: 0.532, 8: 0.817},
    64: {1: 0.013, 2: 0.044, 4: 0.192, 8: 0.538},
}
"""By users and multiplier, from elsewhere: a plain LRU too, over one order of an unknown seed."""


class PlainLru:
    """Whole conversations, the least recently used one losing its tail first."""

    def __init__(self, pages: int) -> None:
        self._free, self._pages = pages, pages
        self._runs: OrderedDict[int, PageKeys] = OrderedDict()

    def ask(self, conversation: int, keys: PageKeys) -> int:
        """How many leading pages were there; all of them are afterwards, if they fit at all."""
        if len(keys) > self._pages:
            return 0
        held = self._runs.pop(conversation, keys[:0])
        common = min(len(held), len(keys))
        differs = np.flatnonzero(held[:common] != keys[:common])
        hit = int(differs[0]) if len(differs) else common
        self._runs[conversation] = keys
        self._free += len(held) - len(keys)
        while self._free < 0:
            oldest, run = next(iter(self._runs.items()))
            lost = min(len(run), -self._free)
            self._free += lost
            if lost == len(run):
                del self._runs[oldest]
            else:
                self._runs[oldest] = run[: len(run) - lost]
        return hit


def plain_hit_rates(trace: Trace, arrivals: Arrivals) -> tuple[dict[int, float], int]:
    """Hit rate of pages for each multiplier, over one order of requests; refusals of the least."""
    keys = TraceKeys(trace, PAGE_SIZE)
    caches = {m: PlainLru(m * PHYSICAL_TOKENS // PAGE_SIZE) for m in MULTIPLIERS}
    hits: dict[int, int] = dict.fromkeys(MULTIPLIERS, 0)
    pages = refused = 0
    for row, instance in recorded_order(trace, arrivals):
        page_keys = keys.page_keys(row, instance)
        pages += len(page_keys)
        refused += int(trace.prompt_tokens[row]) > PHYSICAL_TOKENS
        for multiplier, cache in caches.items():
            hits[multiplier] += cache.ask(instance, page_keys)
    return {multiplier: round(found / pages, 4) for multiplier, found in hits.items()}, refused


def recorded_order(trace: Trace, arrivals: Arrivals) -> list[tuple[int, int]]:
    """Rows and instances in the order of a closed loop whose answers take what was recorded."""
    clock, order = EventClock(), list[tuple[int, int]]()

    def expect(ask: Ask | None) -> None:
        if ask is not None:
            clock.at(ask.at_seconds, lambda: arrive(ask))

    def arrive(ask: Ask) -> None:
        order.append((ask.row, ask.instance))
        took = np.nan_to_num(trace.answer_seconds[ask.row])
        expect(arrivals.answered(ask, clock.now_seconds + float(took)))

    for ask in arrivals.first():
        expect(ask)
    clock.run()
    return order


def run(progress: Progress) -> Measurement:
    """Sixteen users under five seeds, with two caps on thinking; other numbers under one seed."""
    trace = read_trace(Path(os.environ[TRACE_VARIABLE]))
    runs = [
        (USERS, think, seed)
        for think in (LONGEST_THINK_SECONDS, SHORT_THINK_SECONDS)
        for seed in SEEDS
    ]
    runs += [(users, LONGEST_THINK_SECONDS, 0) for users in ESTIMATE if users != USERS]
    seconds: list[float] = []
    found: list[dict[str, Any]] = []
    for done, (users, think, seed) in enumerate(runs):
        progress(f"{users} users, seed {seed}", done, len(runs))
        started = time.process_time()
        loop = ClosedLoop(trace, REQUESTS, users=users, longest_think_seconds=think, seed=seed)
        rates, refused = plain_hit_rates(trace, loop)
        seconds.append(time.process_time() - started)
        found.append(
            {
                "users": users,
                "longest_think_seconds": think,
                "seed": seed,
                "hit_rates": rates,
                "longer_than_one_rank": refused,
            }
        )
    progress("done", len(runs), len(runs))
    config: dict[str, object] = {
        "trace": trace.name,
        "requests": REQUESTS,
        "physical_tokens": PHYSICAL_TOKENS,
        "page_size": PAGE_SIZE,
        "estimate": ESTIMATE,
        "clock": "CPU seconds of one thread, for all four pools at once",
    }
    return Measurement(config, {"plain LRU": seconds}, figures={"runs": found})


if TRACE_VARIABLE in os.environ:
    BENCHMARK = Benchmark(
        "plain_hit_rate", "a plain LRU's hit rates of 20,000 agentic requests", run
    )

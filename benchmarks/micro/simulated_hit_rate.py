"""Hit rates of the engine's pool in simulated time, beside a plain LRU over the same requests.

The plain LRU knows no batches, no locks and no tree: a conversation's last prompt is one run of
pages, and the run that was used longest ago loses its tail first. Users of a closed loop answer
as in the recording and think at most half an hour. `CPKV_AGENTIC_TRACE` names the trace; where it
is not set, this benchmark is not listed. Timed is the whole simulation, in CPU seconds.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import Benchmark, Goal, Measurement, Progress
from cp_shared_kv.planner.arrivals import Arrivals
from cp_shared_kv.planner.capacity import pool_sizes
from cp_shared_kv.planner.clock import EventClock
from cp_shared_kv.planner.gpus import gpu_named
from cp_shared_kv.planner.model_catalogue import model_named
from cp_shared_kv.planner.rates import Rates
from cp_shared_kv.planner.sweep import Case, Sweep, run_sweep
from cp_shared_kv.planner.trace import Trace
from cp_shared_kv.planner.trace_files import read_trace
from cp_shared_kv.planner.trace_keys import PageKeys, TraceKeys
from cp_shared_kv.planner.weight_bytes import weight_bytes

TRACE_VARIABLE = "CPKV_AGENTIC_TRACE"
PAGE_SIZE = 64
PHYSICAL_TOKENS = 237_312
USERS = 16
REQUESTS = 20_000
MULTIPLIERS = (1, 2, 4, 8)
SEEDS = range(5)
ESTIMATE = {1: 0.275, 2: 0.526, 4: 0.793, 8: 0.923}
"""An independent estimate by a plain LRU for the same loop; its seed is not known."""
LONGEST_THINK_SECONDS = 1800.0
SHORT_THINK_SECONDS = 60.0
"""What the logical_pool benchmark caps thinking at."""


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


def plain_hit_rates(trace: Trace, sweep: Sweep) -> dict[int, float]:
    """Hit rate of pages for each multiplier, all over one order of requests."""
    keys = TraceKeys(trace, PAGE_SIZE)
    caches = {m: PlainLru(m * PHYSICAL_TOKENS // PAGE_SIZE) for m in MULTIPLIERS}
    hits, pages = dict.fromkeys(MULTIPLIERS, 0), 0
    for row, instance in recorded_order(trace, sweep.arrivals(trace, Case(1, USERS))):
        page_keys = keys.page_keys(row, instance)
        pages += len(page_keys)
        for multiplier, cache in caches.items():
            hits[multiplier] += cache.ask(instance, page_keys)
    return {multiplier: found / pages for multiplier, found in hits.items()}


def recorded_order(trace: Trace, arrivals: Arrivals) -> list[tuple[int, int]]:
    """Rows and instances in the order of a closed loop whose answers take what was recorded."""
    clock, order = EventClock(), list[tuple[int, int]]()

    def expect(ask: Any) -> None:
        if ask is not None:
            clock.at(ask.at_seconds, lambda: arrive(ask))

    def arrive(ask: Any) -> None:
        order.append((ask.row, ask.instance))
        took = np.nan_to_num(trace.answer_seconds[ask.row])
        expect(arrivals.answered(ask, clock.now_seconds + float(took)))

    for ask in arrivals.first():
        expect(ask)
    clock.run()
    return order


def run(progress: Progress) -> Measurement:
    """Every seed by both ways, and the plain way once more with little time to think."""
    trace = read_trace(Path(os.environ[TRACE_VARIABLE]))
    model = model_named("glm-5.2")
    base = Sweep(
        model=model,
        weights=weight_bytes(model),
        sizes=pool_sizes(model, "bf16", PAGE_SIZE),
        rates=Rates.of_gpu(gpu_named("h200")),
        cp_size=8,
        physical_tokens=PHYSICAL_TOKENS,
        context_length=model.context_length,
        multipliers=MULTIPLIERS,
        users=(USERS,),
        requests=REQUESTS,
        answers="recorded",
        longest_think_seconds=LONGEST_THINK_SECONDS,
    )
    samples: dict[str, list[float]] = {f"replay, {m}x": [] for m in MULTIPLIERS}
    found: list[dict[str, Any]] = []
    for seed in SEEDS:
        sweep = replace(base, seed=seed)
        progress(f"seed {seed}", seed, len(SEEDS))
        engine: dict[int, float] = {}
        for result in run_sweep(sweep, trace, lambda _case, _done: None):
            engine[result.case.multiplier] = result.outcome.hit_rate
            samples[f"replay, {result.case.multiplier}x"].append(result.outcome.cpu_seconds)
        short = replace(sweep, longest_think_seconds=SHORT_THINK_SECONDS)
        found.append(
            {
                "seed": seed,
                "engine": _rounded(engine),
                "plain": _rounded(plain_hit_rates(trace, sweep)),
                "plain_thinking_60_seconds": _rounded(plain_hit_rates(trace, short)),
            }
        )
    progress("done", len(SEEDS), len(SEEDS))
    config: dict[str, object] = {
        **base.as_plain(),
        "users": USERS,
        "estimate": ESTIMATE,
        "hit_rates": found,
        "clock": "CPU seconds of one thread",
    }
    return Measurement(config, samples, [Goal(name, 60.0) for name in samples])


def _rounded(rates: dict[int, float]) -> dict[int, float]:
    return {multiplier: round(rate, 4) for multiplier, rate in rates.items()}


if TRACE_VARIABLE in os.environ:
    BENCHMARK = Benchmark(
        "simulated_hit_rate", "hit rates of 20,000 agentic requests, and a plain LRU's", run
    )

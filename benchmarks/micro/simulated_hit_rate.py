"""Replays of 20,000 agentic requests through the engine's pool: how long they take.

Users of a closed loop get their answers as in the recording and think at most half an hour, under
five seeds; plain_hit_rate is asked the same. `CPKV_AGENTIC_TRACE` names the trace; where it is not
set, this benchmark is not listed. Timed is the whole simulation, in CPU seconds.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.micro.plain_hit_rate import (
    LONGEST_THINK_SECONDS,
    MULTIPLIERS,
    PAGE_SIZE,
    PHYSICAL_TOKENS,
    REQUESTS,
    SEEDS,
    TRACE_VARIABLE,
    USERS,
)
from cp_shared_kv.planner.capacity import pool_sizes
from cp_shared_kv.planner.gpus import gpu_named
from cp_shared_kv.planner.model_catalogue import model_named
from cp_shared_kv.planner.rates import Rates
from cp_shared_kv.planner.sweep import Sweep, run_sweep
from cp_shared_kv.planner.trace_files import read_trace
from cp_shared_kv.planner.weight_bytes import weight_bytes


def run(progress: Progress) -> Measurement:
    """Every seed with every multiplier."""
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
        rates: dict[int, float] = {}
        for result in run_sweep(sweep, trace, lambda _case, _done: None):
            rates[result.case.multiplier] = round(result.outcome.hit_rate, 4)
            samples[f"replay, {result.case.multiplier}x"].append(result.outcome.cpu_seconds)
        found.append({"seed": seed, "hit_rates": rates})
    progress("done", len(SEEDS), len(SEEDS))
    config: dict[str, object] = {
        **base.as_plain(),
        "users": USERS,
        "clock": "CPU seconds of one thread",
    }
    goals = [Goal(name, 60.0) for name in samples]
    return Measurement(config, samples, goals, {"hit_rates": found})


if TRACE_VARIABLE in os.environ:
    BENCHMARK = Benchmark("simulated_hit_rate", "replays of 20,000 agentic requests", run)

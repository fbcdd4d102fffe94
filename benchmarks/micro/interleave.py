"""Timing of several functions side by side, so that a slow moment of the machine hits them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from benchmarks import Progress


def interleaved(
    functions: Mapping[str, Callable[[], object]], rounds: int, progress: Progress
) -> dict[str, list[float]]:
    """Seconds of each call, by name: every function once a round, after one round unmeasured."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    total = (rounds + 1) * len(functions)
    for step in range(total):
        name = list(functions)[step % len(functions)]
        progress(name, step, total)
        started = time.perf_counter()
        functions[name]()
        elapsed = time.perf_counter() - started
        if step >= len(functions):
            seconds[name].append(elapsed)
    progress("done", total, total)
    return seconds

"""Timing of several functions side by side, so that a slow moment of the machine hits them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from benchmarks import Progress


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    progress: Progress,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each call, by name: every function once a round, after one round unmeasured.

    Work of one thread can pass `time.thread_time` as the clock: other processes then do not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    total = (rounds + 1) * len(functions)
    for step in range(total):
        name = list(functions)[step % len(functions)]
        progress(name, step, total)
        started = clock()
        functions[name]()
        elapsed = clock() - started
        if step >= len(functions):
            seconds[name].append(elapsed)
    progress("done", total, total)
    return seconds

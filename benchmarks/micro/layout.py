"""The layout of a million locs against the bare division and remainder that a page split costs.

Both results that a write needs are measured: where each loc lies on its owner, and whether this
rank owns it. Bounds are checked, as they are in use. One thread, and its CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.micro.interleave import interleaved
from cp_shared_kv import CpSharedKVLayout, KVCapacity

LOCS = 1_000_000
ROUNDS = 31
SEED = 0
# name: (cp_size, stripe_pages, page_size, goal). Shifts serve powers of two, all else divides.
CASES = {
    "pow2": (8, 1, 64, 2.0),
    "pow2 B=4": (8, 4, 64, 2.0),
    "other": (6, 1, 48, 5.0),
    "other B=3": (6, 3, 48, 5.0),
}


def run(progress: Progress) -> Measurement:
    """Measure every case for NumPy arrays and for CPU tensors of the same locs."""
    functions: dict[str, Callable[[], object]] = {}
    goals: list[Goal] = []
    for case, (cp_size, stripe_pages, page_size, at_most) in CASES.items():
        capacity = KVCapacity.from_tokens(237_312, page_size, cp_size, stripe_pages)
        layout = CpSharedKVLayout(
            page_size, cp_size, cp_size - 1, stripe_pages, capacity.physical_pages
        )
        locs = np.random.default_rng(SEED).integers(
            page_size, capacity.logical_tokens + page_size, LOCS
        )
        bare = f"{case} div+rem"
        functions[bare] = partial(_divide, torch.from_numpy(locs), page_size)
        kinds: dict[str, Any] = {"torch": torch.from_numpy(locs), "numpy": locs}
        for kind, ids in kinds.items():
            steps = {
                f"{case} {kind} physical": partial(layout.logical_locs_to_physical, ids),
                f"{case} {kind} owned": partial(layout.owned_by_this_rank, ids),
                f"{case} {kind} both": partial(_place, layout, ids),
            }
            functions |= steps
            goals += [Goal(name, at_most, against=bare) for name in steps]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        samples = interleaved(functions, ROUNDS, progress, clock=time.thread_time)
    finally:
        torch.set_num_threads(threads)
    config: dict[str, object] = {
        "locs": LOCS,
        "rounds": ROUNDS,
        "seed": SEED,
        "threads": 1,
        "clock": "thread_time",
        "cases": {
            case: {"cp_size": cp_size, "stripe_pages": stripe_pages, "page_size": page_size}
            for case, (cp_size, stripe_pages, page_size, _) in CASES.items()
        },
    }
    return Measurement(config, samples, goals)


def _divide(locs: torch.Tensor, page_size: int) -> object:
    return torch.div(locs, page_size, rounding_mode="floor"), torch.remainder(locs, page_size)


def _place(layout: CpSharedKVLayout, locs: Any) -> object:
    return layout.logical_locs_to_physical(locs), layout.owned_by_this_rank(locs)


BENCHMARK = Benchmark("layout", "a million locs to owner and physical loc", run)

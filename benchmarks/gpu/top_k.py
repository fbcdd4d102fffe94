"""Top-k of index scores on one GPU: our kernel against torch.topk with ties put in order."""

from __future__ import annotations

import torch

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.gpu.clock import GpuClock
from benchmarks.gpu.workload import INDEX_TOPK
from cp_shared_kv.model.ops import reference

CASES = ((1, 1 << 17), (1024, 1 << 13), (1024, 1 << 15), (512, 1 << 17), (64, 1 << 20))
"""Queries and keys as the engine's blocks have them on a GPU; the first is a step of decode."""
ROUNDS = 7
SETS = 2
OURS, TORCH = "kernel", "torch"


def run(progress: Progress) -> Measurement:
    """Compare both on fresh random scores, then time them."""
    from cp_shared_kv.kernels.select_topk import select_topk

    samples: dict[str, list[float]] = {}
    device = torch.device("cuda")
    for done, (queries, keys) in enumerate(CASES):
        case = f"{queries} queries, {keys >> 10} K"
        progress(case, done, len(CASES))
        generator = torch.Generator(device).manual_seed(done)
        scores = torch.randn(SETS, queries, keys, device=device, generator=generator)
        visible = torch.full((queries,), keys, device=device) - torch.arange(
            queries, device=device
        ).flip(0)
        for of_set in scores:
            expected = reference.select_topk(of_set, visible, INDEX_TOPK)
            assert torch.equal(select_topk(of_set, visible, INDEX_TOPK), expected)
        clock = GpuClock()
        clock.capture(
            OURS, lambda turn, s=scores, v=visible: select_topk(s[turn], v, INDEX_TOPK), SETS
        )
        # The host waits in it, to learn whether there are ties: no graph can hold that.
        clock.launch(
            TORCH,
            lambda turn, s=scores, v=visible: reference.select_topk(s[turn], v, INDEX_TOPK),
            SETS,
        )
        samples |= {f"{case}: {name}": taken for name, taken in clock.samples(ROUNDS).items()}
        torch.cuda.empty_cache()
    progress("", len(CASES), len(CASES))
    cases = sorted({name.rpartition(": ")[0] for name in samples})
    goals = [Goal(f"{case}: {OURS}", 1.0, f"{case}: {TORCH}") for case in cases]
    config: dict[str, object] = {"rounds": ROUNDS, "sets": SETS, "index_topk": INDEX_TOPK}
    return Measurement(config, samples, goals)


BENCHMARK = Benchmark("gpu_top_k", "top-k of index scores by our kernel against torch", run)

"""What the hardware gives: memory, and the links in one direction and in both at once.

By copy engine (a plain copy), by a kernel that reads the peer, and by one that writes to it. One
direction means that one rank moves data and the others wait. A rank's peer is the next one.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import Benchmark, Measurement, Progress
from benchmarks.gpu import RANKS
from benchmarks.gpu.rank import GpuRank, slowest
from cp_shared_kv.kernels.pull_pages import pull_pages
from cp_shared_kv.testing.rank_process import RankContext

NBYTES = 1 << 29
PAGE_BYTES = 1 << 16
ROUNDS = 11


def run(progress: Progress) -> Measurement:
    """Measure each way to move half a gigabyte."""
    from cp_shared_kv.testing.rank_pool import RankPool

    progress("half a gigabyte each way", 0, 1)
    with RankPool(RANKS) as pool:
        samples = slowest(pool.run(f"{__name__}:measure", timeout_seconds=120))
    progress("", 1, 1)
    config: dict[str, object] = {"ranks": RANKS, "rounds": ROUNDS, "bytes": NBYTES}
    return Measurement(config, samples)


def measure(context: RankContext) -> dict[str, Any]:
    """Time them on one rank."""
    rank = GpuRank(context)
    peer = (context.rank + 1) % context.size
    buffer, target = rank.buffer(2 * NBYTES), rank.buffer(NBYTES)
    buffer.tensor.random_(0, 256)
    own, other, there = buffer.tensor[:NBYTES], buffer.peer(peer), target.tensor
    pages = there.view(-1, PAGE_BYTES)
    order = torch.randperm(len(pages), device=rank.device)
    steps = torch.arange(len(pages), dtype=torch.int32, device=rank.device)
    sources = buffer.peer_distances_bytes[peer] // 8 + order * (PAGE_BYTES // 8)
    local, at_peer = order * (PAGE_BYTES // 8), target.peer(peer).view(-1, PAGE_BYTES)

    def pull(_: int) -> None:
        pull_pages(own.view(-1, PAGE_BYTES), sources, steps, pages)

    def push(_: int) -> None:
        pull_pages(own.view(-1, PAGE_BYTES), local, steps, at_peer)

    ways = {
        "peer copy": lambda _: there.copy_(other[NBYTES:]),
        "read by a kernel": pull,
        "write by a kernel": push,
    }
    rank.capture("device copy", lambda _: there.copy_(own), 1)
    for name, operation in ways.items():
        rank.capture(f"{name}, both directions", operation, 1)
        mine = operation if context.rank == 0 else (lambda _: None)
        rank.launch(f"{name}, one direction", mine, 2)
    rank.capture("barrier", lambda _: target.barrier(), 1, 50)
    return rank.samples(ROUNDS)


BENCHMARK = Benchmark("gpu_floors", "memory, links and barriers by themselves", run)

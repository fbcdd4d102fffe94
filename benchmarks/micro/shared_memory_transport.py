"""The shared-memory transport against memcpy of the same segments, in the same memory.

The peers are what one would write by hand: one NumPy slice assignment a segment, and one torch
`copy_` a segment, their offsets at hand as Python numbers. The transport's time holds all of a
write: range checks, finding even stretches, copying. One thread. Every page lies in a pool of
1.5 times as many, so that no pattern stays in the cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.micro.interleave import interleaved
from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.memory.buffers import SharedMemoryBuffer
from cp_shared_kv.transfer.descriptors import PageAreas, expand, merge_pages
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.shared_memory import SharedMemoryTransport
from cp_shared_kv.transfer.transport import PeerInfo, Runs

ROUNDS = 21
SEED = 0
CP_SIZE = 4
# Bytes of a page: fp8_ds_mla latent KV, fp8_scaled index K. And how many pages are sent.
PAGES = {41_984: 1500, 8_448: 6000}
# At least 0.85 of memcpy's throughput.
AT_MOST = 1 / 0.85


def run(progress: Progress) -> Measurement:
    """Measure three patterns of pages at each page size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as stack:
            functions: dict[str, Callable[[], object]] = {}
            config: dict[str, object] = {"rounds": ROUNDS, "seed": SEED, "threads": 1}
            goals: list[Goal] = []
            for page_bytes, pages in PAGES.items():
                pools = _Pools(page_bytes, pages * 3 // 2, stack)
                for pattern, (source, destination) in _patterns(pages).items():
                    runs = pools.runs(source, destination)
                    case = f"{page_bytes} B {pattern}"
                    config[case] = {"segments": runs.count, "bytes": runs.total_bytes}
                    slices = f"{case} numpy slices"
                    functions |= {
                        slices: partial(_numpy_slices, pools, *_lists(runs)),
                        f"{case} torch copy_": partial(_torch_copies, pools, *_lists(runs)),
                        f"{case} transport": partial(pools.write, runs),
                        f"{case} transport, planned": partial(
                            pools.plan_and_write, source, destination
                        ),
                    }
                    goals.append(Goal(f"{case} transport", AT_MOST, against=slices))
            return Measurement(config, interleaved(functions, ROUNDS, progress), goals)
    finally:
        torch.set_num_threads(threads)


class _Pools:
    """A sender's and a receiver's pool of one kind of page, and the transport between them."""

    def __init__(self, page_bytes: int, physical_pages: int, stack: ExitStack) -> None:
        nbytes = page_bytes * (physical_pages + 1)
        self.source, self.destination = (
            SharedMemoryBuffer.create(f"cpkv-bench-{os.getpid()}-{page_bytes}-{end}", nbytes)
            for end in ("from", "to")
        )
        stack.callback(self.source.unlink)
        stack.callback(self.destination.unlink)
        rng = np.random.default_rng(SEED)
        self.source.tensor.numpy()[:] = rng.integers(0, 256, nbytes, dtype=np.uint8)
        self.transport = SharedMemoryTransport("bench-sender")
        stack.callback(self.transport.close)
        self._local = self.transport.register(self.source)
        # Mapped a second time, as another process would.
        self._remote = Region(f"{self.destination.name}", nbytes)
        self.transport.connect(PeerInfo("bench-receiver", (self._remote,)))
        zero = np.zeros(1, dtype=np.int64)
        self._areas = PageAreas(zero, zero, np.array([page_bytes]), physical_pages, physical_pages)

    def runs(self, source: PhysicalPages, destination: PhysicalPages) -> Runs:
        return expand(
            merge_pages(source, destination),
            self._areas,
            local_region=self._local.name,
            remote_region=self._remote.name,
        )

    def write(self, runs: Runs) -> None:
        self.transport.write("bench-receiver", runs).result()

    def plan_and_write(self, source: PhysicalPages, destination: PhysicalPages) -> None:
        self.write(self.runs(source, destination))


def _patterns(pages: int) -> dict[str, tuple[PhysicalPages, PhysicalPages]]:
    rng = np.random.default_rng(SEED)
    pool = pages * 3 // 2

    def shuffled() -> PhysicalPages:
        return PhysicalPages(rng.permutation(pool)[:pages] + 1)

    in_a_row = np.arange(1, pages + 1)
    every_nth = np.arange(1, pool + 1, CP_SIZE)
    return {
        "shuffled on both sides": (shuffled(), shuffled()),
        f"to every {CP_SIZE}th page": (
            PhysicalPages(in_a_row[: len(every_nth)]),
            PhysicalPages(every_nth),
        ),
        "merged to one run": (PhysicalPages(in_a_row), PhysicalPages(in_a_row + pages // 4)),
    }


def _lists(runs: Runs) -> tuple[list[int], list[int], list[int]]:
    return runs.local_offset_bytes.tolist(), runs.remote_offset_bytes.tolist(), runs.nbytes.tolist()


def _numpy_slices(pools: _Pools, start: list[int], to: list[int], nbytes: list[int]) -> None:
    source, destination = pools.source.tensor.numpy(), pools.destination.tensor.numpy()
    for i, j, n in zip(start, to, nbytes, strict=True):
        destination[j : j + n] = source[i : i + n]


def _torch_copies(pools: _Pools, start: list[int], to: list[int], nbytes: list[int]) -> None:
    source, destination = pools.source.tensor, pools.destination.tensor
    for i, j, n in zip(start, to, nbytes, strict=True):
        destination[j : j + n].copy_(source[i : i + n])


BENCHMARK = Benchmark(
    "shared_memory_transport", "pages to a mapped pool, against memcpy of the segments", run
)

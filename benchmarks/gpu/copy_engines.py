"""A prefix's pages of one peer by the copy engines, in one call of the CUDA driver for all of them.

They leave every multiprocessor to whatever computes meanwhile. But the host's call takes long, and
no CUDA graph holds it. Pages are shuffled; beside it the same with neighbours merged, as the read
plan's ascending order makes some. The batch call has no binding in torch: ctypes reaches it.
"""

from __future__ import annotations

import ctypes
import time
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import Benchmark, Measurement, Progress
from benchmarks.gpu import RANKS
from benchmarks.gpu.rank import GpuRank, slowest
from benchmarks.gpu.workload import PAGE_SIZE, Workload, sets_past_the_cache
from cp_shared_kv.testing.rank_process import RankContext

PREFIX_TOKENS = (1 << 13, 1 << 15, 1 << 17, 1 << 20)
POOL_TOKENS = 1 << 18
ROUNDS = 11
_IN_STREAM_ORDER = 1
_OVERLAP_WITH_COMPUTE = 1


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class CopyBatch:
    """Copies of so many bytes from and to these addresses, int64[n] each."""

    def __init__(
        self,
        targets: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
        nbytes: npt.NDArray[np.int64],
    ) -> None:
        self._arrays = [part.astype(np.uint64) for part in (targets, sources, nbytes)]
        self._attributes = _Attributes(
            _IN_STREAM_ORDER, _Location(0, 0), _Location(0, 0), _OVERLAP_WITH_COMPUTE
        )
        self._first = (ctypes.c_size_t * 1)(0)

    def enqueue(self) -> None:
        """On the current stream, which must not be the default one."""
        code = _batch_call()(
            *(part.ctypes.data_as(ctypes.c_void_p) for part in self._arrays),
            ctypes.c_size_t(len(self._arrays[0])),
            ctypes.byref(self._attributes),
            self._first,
            ctypes.c_size_t(1),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if code:
            raise RuntimeError(f"the CUDA driver refused the copies: error {code}")


@cache
def _batch_call() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2


def run(progress: Progress) -> Measurement:
    """Measure bf16 pages at each length."""
    from cp_shared_kv.testing.rank_pool import RankPool

    samples: dict[str, list[float]] = {}
    copies: dict[str, object] = {}
    with RankPool(RANKS) as pool:
        for done, tokens in enumerate(PREFIX_TOKENS):
            case = f"bf16, {tokens >> 10} K"
            progress(case, done, len(PREFIX_TOKENS))
            answers = pool.run(f"{__name__}:measure", timeout_seconds=120, prefix_tokens=tokens)
            taken = slowest([answer["samples"] for answer in answers])
            samples |= {f"{case}: {what}": values for what, values in taken.items()}
            copies[case] = answers[0]["copies"]
    progress("", len(PREFIX_TOKENS), len(PREFIX_TOKENS))
    config: dict[str, object] = {"ranks": RANKS, "rounds": ROUNDS, "copies": copies}
    return Measurement(config, samples)


def measure(context: RankContext, prefix_tokens: int) -> dict[str, Any]:
    """Time it on one rank, after checking what arrives."""
    rank = GpuRank(context)
    peer = (context.rank + 1) % context.size
    work = Workload.make(rank, "bf16", max(prefix_tokens, POOL_TOKENS))
    page_bytes = work.pool.spec.latent.page_bytes
    pages = prefix_tokens // PAGE_SIZE // context.size
    other = work.peer_pages(peer, "latent", 0)
    scratch = torch.empty(pages, page_bytes, dtype=torch.uint8, device=rank.device)
    physical: list[npt.NDArray[np.int64]] = []
    for seed in range(sets_past_the_cache(2 * pages * page_bytes)):
        plan = work.plan(prefix_tokens, seed)
        physical.append(plan.physical_pages.numpy()[plan.owner_range(peer)])
    targets = scratch.data_ptr() + np.arange(pages) * page_bytes
    shuffled = [
        CopyBatch(targets, other.data_ptr() + of_set * page_bytes, np.full(pages, page_bytes))
        for of_set in physical
    ]
    merged: list[CopyBatch] = []
    runs = 0
    for of_set in physical:
        ascending = np.sort(of_set)
        first = np.flatnonzero(np.diff(ascending, prepend=-9) != 1)
        lengths = np.diff(np.append(first, pages))
        runs = len(first)
        merged.append(
            CopyBatch(
                targets[first],
                other.data_ptr() + ascending[first] * page_bytes,
                lengths * page_bytes,
            )
        )
    with torch.cuda.stream(torch.cuda.Stream()):
        for batch, order in ((shuffled[0], physical[0]), (merged[0], np.sort(physical[0]))):
            scratch.fill_(0xEE)
            batch.enqueue()
            assert torch.equal(scratch, other[torch.from_numpy(order).to(rank.device)])
        calls: list[float] = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            shuffled[0].enqueue()
            calls.append(time.perf_counter() - started)
        torch.cuda.synchronize()
    sets = len(physical)
    rank.launch("peer copy", lambda turn: scratch.copy_(other[turn : turn + pages]), 1)
    rank.launch("shuffled pages", lambda turn: shuffled[turn].enqueue(), sets)
    rank.launch("neighbours merged", lambda turn: merged[turn].enqueue(), sets)
    samples = rank.samples(ROUNDS)
    samples["the host's call, shuffled pages"] = calls
    return {"samples": samples, "copies": {"shuffled": pages, "merged": runs}}


BENCHMARK = Benchmark("gpu_copy_engines", "remote pages in one batch for the copy engines", run)

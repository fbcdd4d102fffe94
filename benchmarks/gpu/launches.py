"""What a short read costs the host: launches that nothing hides, on one GPU.

The rates of `auto` (reads/read_costs.py) say how long bytes take. Of a short prefix the bytes are
through before the host has launched the next kernel; then what counts is how often it launches.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks import Benchmark, Measurement, Progress
from benchmarks.gpu.workload import INDEX_TOPK, LAYERS, PAGE_SIZE, production_spec
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.mapped_buffers import MappedBuffer
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.reads.peer_pull import PeerPullReader
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan
from cp_shared_kv.reads.read_costs import LAUNCH_SECONDS, ROWS_HOST_SECONDS
from cp_shared_kv.reads.scratch import Scratch
from cp_shared_kv.reads.selected_rows import SelectedRowsReader

PAGES = 16
CALLS = 200
"""Few enough that the GPU's queue never fills, and the host never waits for it."""
ROUNDS = 9
PULL, ROWS, COPY = "pull of 16 pages", "rows of one token", "copy of one row by torch"


def run(progress: Progress) -> Measurement:
    """Seconds of the host for each call, the GPU's work not waited for."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        calls = _calls(device)
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for done in range(-2, ROUNDS):
            progress("", max(0, done), ROUNDS)
            for name, call in calls.items():
                seconds = _host_seconds(call)
                if done >= 0:
                    samples[name].append(seconds)
        progress("", ROUNDS, ROUNDS)
    finally:
        dist.destroy_process_group()
    figures: dict[str, object] = {
        "seconds that auto reckons with": {PULL: LAUNCH_SECONDS, ROWS: ROWS_HOST_SECONDS}
    }
    return Measurement({"calls": CALLS, "rounds": ROUNDS}, samples, figures=figures)


def _calls(device: torch.device) -> dict[str, Callable[[], object]]:
    spec = production_spec("bf16")
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    buffer = MappedBuffer.create(spec.pool_bytes(2 * PAGES), group, device)
    buffer.peer_distances_bytes = (0, 0)  # one process is both of two ranks
    pool = KVPool(spec, 2 * PAGES, buffer)
    layout = CpSharedKVLayout(PAGE_SIZE, 2, 0, physical_pages=2 * PAGES)
    pages = LogicalPages(layout.physical_pages_to_logical(torch.arange(1, PAGES + 1).numpy()))
    plan = ReadPlan.build(layout, [BatchSpan(pages, PAGES * PAGE_SIZE - 1, 1)]).to(device)
    reader = PeerPullReader(0, pool)
    scratch = Scratch(1 << 30, device)
    whole = scratch.take("index pages", PAGES * spec.page_bytes("latent")).view(PAGES, -1)
    rows = SelectedRowsReader(reader, 2, pool, scratch)
    rows.begin(plan, INDEX_TOPK)
    selected = torch.arange(INDEX_TOPK, device=device).remainder(PAGES * PAGE_SIZE)[None]
    chunk = torch.zeros(1, spec.latent.row_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(chunk)
    return {
        PULL: lambda: reader.read("latent", LAYERS - 1, plan, whole),
        ROWS: lambda: rows.read(LAYERS - 1, selected, chunk),
        COPY: lambda: target.copy_(chunk),
    }


def _host_seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(CALLS):
        call()
    taken = time.perf_counter() - begun
    torch.cuda.synchronize()
    return taken / CALLS


BENCHMARK = Benchmark("gpu_launches", "what the host needs for a short read", run)

"""Owner-only writes of a chunk, plain and quantised, against a plain store of the owned rows.

Two plain stores of as many bf16 rows, ready and consecutive: a device copy to consecutive places,
which needs no plan at all; and torch's `index_copy_` to the places of the plan.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.gpu import RANKS
from benchmarks.gpu.rank import GpuRank, slowest
from benchmarks.gpu.workload import INDEX, LATENT, PAGE_SIZE, ROPE, Workload
from cp_shared_kv.layout.pages import LogicalLocs
from cp_shared_kv.memory.gpu_writes import store_index, store_latent
from cp_shared_kv.memory.pool import WritePlan
from cp_shared_kv.testing.rank_process import RankContext

NEW_TOKENS = (64, 512, 4096)
"""Tokens a rank computes: it owns as many of the whole chunk's."""
POOL_TOKENS = 1 << 18
ROUNDS = 11
SETS = 8
AT_MOST = 1.15
COPY, PLACED = "device copy", "index_copy_"


def run(progress: Progress) -> Measurement:
    """Measure both latent formats and the index K at each size of chunk."""
    from cp_shared_kv.testing.rank_pool import RankPool

    cases = [(name, tokens) for name in ("bf16", "fp8_ds_mla") for tokens in NEW_TOKENS]
    samples: dict[str, list[float]] = {}
    goals: list[Goal] = []
    with RankPool(RANKS) as pool:
        for done, (name, tokens) in enumerate(cases):
            progress(f"{name}, {tokens}", done, len(cases))
            answers = pool.run(
                f"{__name__}:measure", timeout_seconds=120, latent_name=name, new_tokens=tokens
            )
            taken = slowest([answer["samples"] for answer in answers])
            samples |= {f"{name}, {tokens} tokens: {what}": taken[what] for what in taken}
            for kind in ("latent", "index K"):
                case = f"{name}, {tokens} tokens: {kind}"
                goals += [Goal(case, AT_MOST, f"{case}, {store}") for store in (COPY, PLACED)]
    progress("", len(cases), len(cases))
    config: dict[str, object] = {"ranks": RANKS, "rounds": ROUNDS, "pool_tokens": POOL_TOKENS}
    return Measurement(config, samples, goals)


def measure(context: RankContext, latent_name: str, new_tokens: int) -> dict[str, Any]:
    """Time it on one rank; each turn has its own values and its own pages."""
    rank = GpuRank(context)
    work = Workload.make(rank, latent_name, POOL_TOKENS)
    spec, tokens = work.pool.spec, new_tokens * context.size
    random = np.random.default_rng(0)
    pages = random.permutation(work.layout.logical_pages)[: SETS * (tokens // PAGE_SIZE)] + 1
    locs = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(SETS, tokens)
    plans = [WritePlan.build(work.layout, LogicalLocs(of_set)).to(rank.device) for of_set in locs]
    values = torch.randn(
        SETS, tokens, LATENT + ROPE + INDEX, dtype=torch.bfloat16, device=rank.device
    )
    latents, k_pes, index_ks = values.split((LATENT, ROPE, INDEX), dim=2)
    latent_pages, index_pages = work.pool.pages("latent", 0), work.pool.pages("index", 0)
    owned = [len(plan.rows) for plan in plans]
    stored = {
        "latent": torch.randn(
            2, SETS, max(owned), LATENT + ROPE, dtype=torch.bfloat16, device=rank.device
        ),
        "index K": torch.randn(
            2, SETS, max(owned), INDEX, dtype=torch.bfloat16, device=rank.device
        ),
    }

    rows_in_pool = (work.pool.physical_pages + 1) * PAGE_SIZE
    places = {
        kind: torch.empty(rows_in_pool, ready.shape[3], dtype=torch.bfloat16, device=rank.device)
        for kind, ready in stored.items()
    }
    places = {kind: rows.view(torch.int64) for kind, rows in places.items()}

    def device_copy(kind: str, turn: int) -> None:
        stored[kind][0, turn, : owned[turn]].copy_(stored[kind][1, turn, : owned[turn]])

    def index_copy(kind: str, turn: int) -> None:
        ready = stored[kind][1, turn, : owned[turn]].view(torch.int64)
        places[kind].index_copy_(0, plans[turn].physical_locs, ready)

    def scatter_latent(turn: int) -> None:
        rows = spec.latent.encode(latents[turn], k_pes[turn])
        work.pool.write("latent", 0, rows, plans[turn])

    for kind in stored:
        rank.capture(f"{kind}, {COPY}", partial(device_copy, kind), SETS, 4 * SETS)
        rank.capture(f"{kind}, {PLACED}", partial(index_copy, kind), SETS, 4 * SETS)
    rank.capture(
        "latent",
        lambda turn: store_latent(
            spec.latent, latent_pages, latents[turn], k_pes[turn], plans[turn]
        ),
        SETS,
        4 * SETS,
    )
    rank.capture(
        "index K",
        lambda turn: store_index(spec.index, index_pages, index_ks[turn], plans[turn]),
        SETS,
        4 * SETS,
    )
    rank.capture("latent, encode and scatter by torch", scatter_latent, SETS, 4 * SETS)
    return {"samples": rank.samples(ROUNDS)}


BENCHMARK = Benchmark("gpu_writes", "owner-only writes against a plain store", run)

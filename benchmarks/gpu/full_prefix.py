"""One layer's whole prefix in every rank's scratch, against the ways that others take.

The floor is a plain copy of as many bytes as come from the peer, both ranks at once. Pushes
include the barrier that follows. The plan's way comes in two versions: as it is written there,
with a mask, which makes the host wait; and with each rank's pages worked out before, in a graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.gpu import RANKS
from benchmarks.gpu.rank import GpuRank, slowest
from benchmarks.gpu.workload import PAGE_SIZE, Workload, sets_past_the_cache
from cp_shared_kv.kernels.pull_pages import pull_pages
from cp_shared_kv.kernels.push_pages import push_pages
from cp_shared_kv.testing.rank_process import RankContext

PREFIX_TOKENS = (1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 20)
POOL_TOKENS = 1 << 18
"""At least so many in the pool, so that a prefix is spread over more than its own pages."""
ROUNDS = 11
FLOOR = "peer copy"


def run(progress: Progress) -> Measurement:
    """Measure both formats at each length."""
    from cp_shared_kv.testing.rank_pool import RankPool

    cases = [(name, tokens) for name in ("bf16", "fp8_ds_mla") for tokens in PREFIX_TOKENS]
    samples: dict[str, list[float]] = {}
    remote_bytes: dict[str, int] = {}
    goals: list[Goal] = []
    with RankPool(RANKS) as pool:
        for done, (name, tokens) in enumerate(cases):
            case = f"{name}, {tokens >> 10} K"
            progress(case, done, len(cases))
            answers = pool.run(
                f"{__name__}:measure",
                timeout_seconds=120,
                latent_name=name,
                prefix_tokens=tokens,
            )
            taken = slowest([answer["samples"] for answer in answers])
            samples |= {f"{case}: {what}": values for what, values in taken.items()}
            remote_bytes[case] = answers[0]["remote_bytes"]
            goals += _goals(case, 0.95 if tokens >= 1 << 17 else 0.85)
    progress("", len(cases), len(cases))
    config: dict[str, object] = {
        "ranks": RANKS,
        "rounds": ROUNDS,
        "remote_bytes": remote_bytes,
        "pages": f"shuffled, {RANKS - 1} of {RANKS} remote",
    }
    return Measurement(config, samples, goals)


def _goals(case: str, of_floor: float) -> list[Goal]:
    bounds = (
        (FLOOR, 1 / of_floor),
        ("pack and all-gather", 1 / 1.35),
        ("zero fill, masked copy, all-reduce", 1 / 3.3),
    )
    return [
        Goal(f"{case}: {way}", bound, against=f"{case}: {peer}")
        for way in ("push", "pull")
        for peer, bound in bounds
    ]


def measure(context: RankContext, latent_name: str, prefix_tokens: int) -> dict[str, Any]:
    """Time it on one rank, after checking that each way gives the same bytes."""
    rank = GpuRank(context)
    me, size = context.rank, context.size
    work = Workload.make(rank, latent_name, max(prefix_tokens, POOL_TOKENS))
    page_bytes, pages = work.pool.spec.latent.page_bytes, prefix_tokens // PAGE_SIZE
    sets = sets_past_the_cache(pages * page_bytes)
    plans = [work.plan(prefix_tokens, seed) for seed in range(sets)]
    sources = [work.sources(plan, "latent") for plan in plans]
    mine = [plan.physical_pages[plan.owner_range(me)].to(rank.device) for plan in plans]
    logical = [torch.from_numpy(plan.logical_pages).to(rank.device) for plan in plans]
    start, each = plans[0].owner_starts[me], pages // size
    shared = rank.buffer(pages * page_bytes)
    scratch = shared.tensor.view(pages, page_bytes)
    distances = torch.tensor(shared.peer_distances_bytes, device=rank.device) // 8
    packed = torch.empty(each, page_bytes, dtype=torch.uint8, device=rank.device)
    own = work.pool.pages("latent", 0)
    # The next rank first, as the readers do, so that no rank is everybody's first.
    order = [(me + step) % size for step in range(1, size)]
    others = {owner: work.peer_pages(owner, "latent", 0) for owner in order}

    def peer_copy(turn: int) -> None:
        first = turn * each % (len(own) - each)
        for place, owner in enumerate(order):
            target = scratch[place * each : (place + 1) * each]
            target.copy_(others[owner][first : first + each])

    def pull(turn: int) -> None:
        pull_pages(own, sources[turn].sources, sources[turn].order, scratch)

    def push(turn: int) -> None:
        push_pages(own, mine[turn], scratch, start, distances, me)
        shared.barrier()

    def all_gather(turn: int) -> None:
        torch.index_select(own, 0, mine[turn], out=packed)
        rank.nccl.all_gather_bytes(packed.view(-1), scratch.view(size, -1))

    # A sum of numbers, as in the plan; fp8 rows are not numbers, so theirs is a sum of bytes.
    numbers = torch.bfloat16 if latent_name == "bf16" else torch.uint8

    def all_reduce(turn: int) -> None:
        scratch.zero_()
        scratch[start : start + each] = own[mine[turn]]
        dist.all_reduce(scratch.view(numbers), group=rank.nccl_process_group)

    def as_planned(turn: int) -> None:
        view = torch.zeros_like(scratch)
        mask = work.layout.owned_pages_mask(logical[turn])
        if mask.any():
            view[mask] = own[work.layout.logical_pages_to_physical(logical[turn][mask])]
        dist.all_reduce(view.view(numbers), group=rank.nccl_process_group)

    expected = torch.cat([
        (own if owner == me else others[owner])[
            plans[0].physical_pages[plans[0].owner_range(owner)].to(rank.device)
        ]
        for owner in range(size)
    ])  # fmt: skip
    for way in (pull, push, all_gather):
        scratch.fill_(0xEE)
        shared.barrier()
        way(0)
        assert torch.equal(scratch, expected), way.__name__
    del expected
    rank.capture(FLOOR, peer_copy, sets)
    rank.capture("pull", pull, sets)
    rank.capture("push", push, sets)
    rank.capture("pack and all-gather", all_gather, sets)
    rank.capture("zero fill, copy, all-reduce, planned", all_reduce, sets)
    rank.launch("zero fill, masked copy, all-reduce", as_planned, sets)
    return {"samples": rank.samples(ROUNDS), "remote_bytes": (size - 1) * each * page_bytes}


BENCHMARK = Benchmark("gpu_full_prefix", "a layer's whole prefix: push, pull, and collectives", run)

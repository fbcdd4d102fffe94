"""Only the rows that this rank's new tokens selected, against the whole prefix of a layer.

Uniform: each token draws its 2048 rows from all of the prefix. Clustered: all tokens of a rank
draw theirs from the same 20 windows of 512 rows, 1 % of a prefix of 1 M. The index K that the
selection is made from must be there whole: its pull is measured beside it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.gpu import RANKS
from benchmarks.gpu.rank import GpuRank, slowest
from benchmarks.gpu.workload import INDEX_TOPK, PAGE_SIZE, Workload
from cp_shared_kv.kernels.pull_pages import pull_pages
from cp_shared_kv.kernels.pull_rows import pull_rows
from cp_shared_kv.kernels.push_pages import push_pages
from cp_shared_kv.kernels.select_rows import SelectedRows
from cp_shared_kv.reads.page_sources import PageSources
from cp_shared_kv.testing.rank_process import RankContext

PREFIX_TOKENS = (1 << 17, 1 << 20)
NEW_TOKENS = 64
WINDOWS, WINDOW_ROWS = 20, 512
ROUNDS = 11
SETS = 4
"""Selections that an operation goes round, so that none is read from the L2 cache."""


def run(progress: Progress) -> Measurement:
    """Measure both formats at each prefix, uniform and clustered."""
    from cp_shared_kv.testing.rank_pool import RankPool

    cases = [
        (name, tokens, how)
        for name in ("bf16", "fp8_ds_mla")
        for tokens in PREFIX_TOKENS
        for how in ("uniform", "clustered")
    ]
    samples: dict[str, list[float]] = {}
    counted: dict[str, object] = {}
    goals: list[Goal] = []
    with RankPool(RANKS) as pool:
        for done, (name, tokens, how) in enumerate(cases):
            case = f"{name}, {tokens >> 10} K, {how}"
            progress(case, done, len(cases))
            answers = pool.run(
                f"{__name__}:measure",
                timeout_seconds=120,
                latent_name=name,
                prefix_tokens=tokens,
                how=how,
            )
            taken = slowest([answer["samples"] for answer in answers])
            samples |= {f"{case}: {what}": values for what, values in taken.items()}
            counted[case] = [answer["counted"] for answer in answers]
            if tokens == max(PREFIX_TOKENS):
                goals += [
                    Goal(f"{case}: selected rows", 1 / 5, against=f"{case}: whole prefix, {way}")
                    for way in ("pull", "push")
                ]
    progress("", len(cases), len(cases))
    config: dict[str, object] = {
        "ranks": RANKS,
        "rounds": ROUNDS,
        "new_tokens_a_rank": NEW_TOKENS,
        "index_topk": INDEX_TOPK,
        "clusters": f"{WINDOWS} windows of {WINDOW_ROWS} rows, shared by a rank's tokens",
        "counted": counted,
    }
    return Measurement(config, samples, goals)


def measure(context: RankContext, latent_name: str, prefix_tokens: int, how: str) -> dict[str, Any]:
    """Time it on one rank, after checking each row that was fetched."""
    rank = GpuRank(context)
    work = Workload.make(rank, latent_name, prefix_tokens)
    plan = work.plan(prefix_tokens, seed=0)
    latent, index = (work.sources(plan, kind) for kind in ("latent", "index"))
    spec, pages = work.pool.spec, prefix_tokens // PAGE_SIZE
    shared = rank.buffer(pages * spec.latent.page_bytes)
    whole = shared.tensor.view(pages, -1)
    mine = plan.physical_pages[plan.owner_range(context.rank)].to(rank.device)
    distances = torch.tensor(shared.peer_distances_bytes, device=rank.device) // 8
    index_k = torch.empty(pages, spec.index.page_bytes, dtype=torch.uint8, device=rank.device)
    topk = [choose(rank, prefix_tokens, how, seed) for seed in range(SETS)]
    selections = [Selection(work, latent, prefix_tokens, indices) for indices in topk]

    def pull_whole(turn: int) -> None:
        pull_pages(work.pool.pages("latent", turn % 2), latent.sources, latent.order, whole)

    def push_whole(turn: int) -> None:
        start = plan.owner_starts[context.rank]
        layer_pages = work.pool.pages("latent", turn % 2)
        push_pages(layer_pages, mine, whole, start, distances, context.rank)
        shared.barrier()

    def pull_index(turn: int) -> None:
        pull_pages(work.pool.pages("index", turn % 2), index.sources, index.order, index_k)

    pull_whole(0)
    for selection in selections:
        selection.run(0)
        got = selection.rows[selection.compact.long()]
        assert torch.equal(got, whole.view(-1, got.shape[2])[selection.topk.long()])
    rank.capture("whole prefix, pull", pull_whole, 2)
    rank.capture("whole prefix, push", push_whole, 2)
    rank.capture("index K, whole prefix", pull_index, 2)
    rank.capture("selected rows", lambda turn: selections[turn].run(turn % 2), SETS)
    rank.capture("finding and numbering them", lambda turn: selections[turn].find(), SETS)
    rank.capture("fetching them", lambda turn: selections[turn].fetch(turn % 2), SETS)
    samples = rank.samples(ROUNDS)
    fetched = [int(selection.selected.count) for selection in selections]
    remote = [selection.remote_rows(plan.owner_range(context.rank)) for selection in selections]
    return {
        "samples": samples,
        "counted": {
            "rows": fetched,
            "remote_rows": remote,
            "remote_bytes": [rows * spec.latent.row_bytes for rows in remote],
            "index_k_remote_bytes": pages
            // context.size
            * (context.size - 1)
            * spec.index.page_bytes,
        },
    }


class Selection:
    """One selection with its memory."""

    def __init__(
        self,
        work: Workload,
        sources: PageSources,
        prefix_tokens: int,
        topk: torch.Tensor,
    ) -> None:
        self.work, self.sources, self.topk = work, sources, topk
        self.selected = SelectedRows.make(prefix_tokens, topk.numel(), topk.device)
        self.compact = torch.empty_like(topk)
        row_bytes = work.pool.spec.latent.row_bytes
        self.rows = torch.empty(
            len(self.selected.rows), row_bytes, dtype=torch.uint8, device=topk.device
        )

    def find(self) -> None:
        self.selected.select(self.topk, self.compact, 0)

    def fetch(self, layer: int) -> None:
        pull_rows(
            self.work.pool.pages("latent", layer),
            self.sources.sources,
            PAGE_SIZE,
            self.selected.rows,
            self.selected.count,
            self.work.layout.cp_size,
            self.rows,
        )

    def run(self, layer: int) -> None:
        self.find()
        self.fetch(layer)

    def remote_rows(self, own_pages: slice) -> int:
        """How many of the rows come from peers."""
        rows = self.selected.rows[: int(self.selected.count)].cpu().numpy() // PAGE_SIZE
        return int(np.sum((rows < own_pages.start) | (rows >= own_pages.stop)))


def choose(rank: GpuRank, prefix_tokens: int, how: str, seed: int) -> torch.Tensor:
    """i32[NEW_TOKENS, INDEX_TOPK]: what this rank's tokens select, other rows on each rank."""
    random = np.random.default_rng((seed, rank.context.rank))
    draw = partial(random.choice, size=INDEX_TOPK, replace=False)
    if how == "uniform":
        chosen = [draw(prefix_tokens) for _ in range(NEW_TOKENS)]
    else:
        starts = random.choice(prefix_tokens // WINDOW_ROWS, WINDOWS, replace=False) * WINDOW_ROWS
        rows = (starts[:, None] + np.arange(WINDOW_ROWS)).reshape(-1)
        chosen = [draw(rows) for _ in range(NEW_TOKENS)]
    return torch.from_numpy(np.stack(chosen).astype(np.int32)).to(rank.device)


BENCHMARK = Benchmark("gpu_selected_rows", "rows selected by new tokens against all rows", run)

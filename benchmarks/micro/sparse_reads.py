"""A layer's reads by whole prefixes against index K and the selected rows alone, on one CPU thread.

Four ranks' pools, of which three would be others', at DeepSeek-V3.2's widths in fp8; pages in
shuffled order. 64 new tokens select 2,048 rows each: any of the prefix (uniform), or those of 16
stretches of 256 that they share (clustered). The figures have the bytes that each way copies and
the scratch that it needs; both ways copy index K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks import Benchmark, Measurement, Progress
from benchmarks.micro.interleave import interleaved
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan
from cp_shared_kv.reads.pull import PullReader
from cp_shared_kv.reads.pull_rows import PullRowsReader
from cp_shared_kv.reads.scratch import Scratch

ROUNDS = 9
CP_SIZE = 4
PAGE_SIZE = 64
PREFIX_TOKENS = (1 << 13, 1 << 15, 1 << 17)
NEW_TOKENS, INDEX_TOPK = 64, 2048
STRETCHES, STRETCH_TOKENS = 16, 256


class _OneOfMany:
    """Rank 0, whose peers need no answer: a pull waits for nobody."""

    cp_rank, cp_size = 0, CP_SIZE

    def all_gather_bytes(self, local: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError(f"a pull gathers nothing: {local.shape} to {out.shape}")

    def barrier(self) -> None:
        pass


def run(progress: Progress) -> Measurement:
    """Each length and each kind of selection."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        functions: dict[str, Callable[[], object]] = {}
        figures: dict[str, object] = {}
        for prefix_tokens in PREFIX_TOKENS:
            reads = _Reads(prefix_tokens)
            functions[f"{prefix_tokens}: whole"] = reads.whole
            functions[f"{prefix_tokens}: index K"] = reads.index
            figures[f"{prefix_tokens}: whole"] = {"bytes": reads.whole_bytes}
            for how in ("uniform", "clustered"):
                selected = _selected(prefix_tokens, how)
                functions[f"{prefix_tokens}: sparse, {how}"] = partial(reads.sparse, selected)
                figures[f"{prefix_tokens}: sparse, {how}"] = {
                    "bytes": reads.index_bytes + reads.row_bytes * len(selected.unique()),
                    "rows": len(selected.unique()),
                }
        config: dict[str, object] = {
            "rounds": ROUNDS,
            "ranks": CP_SIZE,
            "new_tokens": NEW_TOKENS,
            "index_topk": INDEX_TOPK,
            "formats": "fp8_ds_mla, fp8_scaled",
            "threads": 1,
        }
        return Measurement(config, interleaved(functions, ROUNDS, progress), figures=figures)
    finally:
        torch.set_num_threads(threads)


class _Reads:
    """One prefix, and one rank's reads of a layer of it."""

    def __init__(self, prefix_tokens: int) -> None:
        pages = prefix_tokens // PAGE_SIZE
        spec = KVPoolSpec(
            latent_format("fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=64, page_size=PAGE_SIZE),
            index_format("fp8_scaled", index_head_dim=128, page_size=PAGE_SIZE),
            num_layers=1,
            index_layers=(0,),
        )
        physical_pages = pages // CP_SIZE + 1
        pools = [
            KVPool(spec, physical_pages, PrivateBuffer(spec.pool_bytes(physical_pages)))
            for _ in range(CP_SIZE)
        ]
        layout = CpSharedKVLayout(PAGE_SIZE, CP_SIZE, 0, physical_pages=physical_pages)
        order = np.random.default_rng(0).permutation(CP_SIZE * physical_pages) + 1
        request = BatchSpan(LogicalPages(order[: pages + 1]), prefix_tokens, NEW_TOKENS)
        self._plan = ReadPlan.build(layout, [request])
        self._pages = PullReader(_OneOfMany(), pools)
        self._rows = PullRowsReader(pools, Scratch(1 << 40))
        self._rows.begin(self._plan, prefix_tokens)
        self.row_bytes = spec.latent.row_bytes
        self._chunk = torch.zeros(NEW_TOKENS, self.row_bytes, dtype=torch.uint8)
        self._latent = torch.zeros(pages, spec.latent.page_bytes, dtype=torch.uint8)
        self._index = torch.zeros(pages, spec.index.page_bytes, dtype=torch.uint8)
        self.index_bytes = self._index.numel()
        self.whole_bytes = self.index_bytes + self._latent.numel()

    def index(self) -> None:
        self._pages.read("index", 0, self._plan, self._index)

    def whole(self) -> None:
        self.index()
        self._pages.read("latent", 0, self._plan, self._latent)

    def sparse(self, selected: torch.Tensor) -> None:
        self.index()
        self._rows.read(0, selected, self._chunk)


def _selected(prefix_tokens: int, how: str) -> torch.Tensor:
    rng = np.random.default_rng(1)
    candidates = np.arange(prefix_tokens)
    if how == "clustered":
        starts = rng.choice(prefix_tokens // STRETCH_TOKENS, STRETCHES, replace=False)
        candidates = (starts[:, None] * STRETCH_TOKENS + np.arange(STRETCH_TOKENS)).reshape(-1)
    chosen = [np.sort(rng.choice(candidates, INDEX_TOPK, replace=False)) for _ in range(NEW_TOKENS)]
    return torch.from_numpy(np.stack(chosen))


BENCHMARK = Benchmark("sparse_reads", "selected rows and index K against whole prefixes", run)

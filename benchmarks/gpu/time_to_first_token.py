"""Time to first token on two GPUs: every page on every rank, against one owner for each page.

Four layers of DeepSeek-V3.2 at full widths with random weights (random_model.py). A request whose
prefix is cached, of random values in shuffled pages, brings new tokens that both ranks compute
together; the clock runs on the hosts from the batch message to the sampled token, of the slower
rank. Left out is what sharing does not touch: HTTP, the controller, the transfer to decode. All
ways take turns in each round. The model is run as the engine runs it, with the same plans, readers
and scratch, and all ways must give the same logits, bit for bit.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.gpu import RANKS
from benchmarks.gpu.random_model import EXPERTS, LAYERS, SHAPE, random_transformer
from benchmarks.gpu.rank import GpuRank, slowest
from benchmarks.gpu.workload import PAGE_SIZE
from cp_shared_kv.engine.config_values import KVReader
from cp_shared_kv.engine.model_spec import pool_spec
from cp_shared_kv.engine.rank_pools import RankPools
from cp_shared_kv.engine.readers import make_reader
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.reads.forward_kv import ForwardKV
from cp_shared_kv.reads.group import GpuGroup
from cp_shared_kv.reads.plan import BatchSpan
from cp_shared_kv.testing.rank_process import RankContext

if TYPE_CHECKING:
    from cp_shared_kv.testing.rank_pool import RankPool

PREFIX_TOKENS = (1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 20)
NEW_TOKENS = (4096, 512, 64)
"""Of both ranks together: a long question, and short ones, which leave less to hide behind, and of
which the last cannot select all of a long prefix."""
FORMATS = ("bf16", "fp8_e4m3")
ROUNDS = 5
WARM_UPS = 1
SCRATCH_BYTES = 8 << 30
FILLED_PAGES = 1 << 10
GOAL = 1.03
READS: dict[str, KVReader] = {
    "auto": "cheapest",
    "pull": "pull",
    "push": "push",
    "sparse": "sparse",
    "collective": "collective",
}


def run(progress: Progress) -> Measurement:
    """Both formats at each length."""
    from cp_shared_kv.testing.rank_pool import RankPool

    cases = [(name, tokens) for tokens in PREFIX_TOKENS for name in FORMATS]
    samples: dict[str, list[float]] = {}
    with RankPool(RANKS) as pool:
        for done, (name, tokens) in enumerate(cases):
            progress(f"{name}, {tokens >> 10} K", done, len(cases))
            samples |= measure_case(pool, name, tokens)
    progress("", len(cases), len(cases))
    return measurement(samples)


def measure_case(pool: RankPool, kv_cache_dtype: str, prefix_tokens: int) -> dict[str, list[float]]:
    """Samples of one format and prefix, of the slower rank."""
    answers = pool.run(
        f"{__name__}:measure",
        timeout_seconds=240,
        kv_cache_dtype=kv_cache_dtype,
        prefix_tokens=prefix_tokens,
    )
    return slowest([answer["samples"] for answer in answers])


def measurement(samples: dict[str, list[float]]) -> Measurement:
    """What is recorded of the cases that were measured."""
    replicated = {sample.rpartition(": ")[0] for sample in samples}
    goals = [
        Goal(f"{case}: {way}", GOAL, f"{case}: replicated")
        for case in sorted(replicated)
        for way in READS
    ]
    config: dict[str, object] = {
        "ranks": RANKS,
        "rounds": ROUNDS,
        "layers": LAYERS,
        "experts": EXPERTS,
        "shape": vars(SHAPE),
        "new_tokens": "of both ranks together, behind the + in a sample's name",
        "clock": "hosts, from the batch to the sampled token; the slower rank",
    }
    return Measurement(config, samples, goals)


@cache
def _model(device: torch.device) -> Transformer:
    return random_transformer(device)


_groups: dict[int, GpuGroup] = {}


def _group(context: RankContext) -> GpuGroup:
    """Of the call's ranks; made once, since each has buffers of its own."""
    if context.size not in _groups:
        nccl = GpuRank(context).nccl_process_group
        _groups[context.size] = GpuGroup(context.process_group, nccl)
    return _groups[context.size]


class _Way:
    """One way to keep the prefix and to read it."""

    def __init__(
        self, model: Transformer, pools: RankPools, group: GpuGroup, kv_read: KVReader
    ) -> None:
        self._model, self._pools, self._group = model, pools, group
        self._reads = make_reader(kv_read, pools, group, SCRATCH_BYTES, index_topk=SHAPE.index_topk)

    @torch.inference_mode()
    def first_token(self, span: BatchSpan, token_ids: torch.Tensor) -> torch.Tensor:
        """The logits of the last token, on the rank that has it; in host memory."""
        kv = ForwardKV.build(
            self._pools.pool,
            self._pools.layout,
            self._group,
            self._reads.reader,
            [span],
            "in-seq-split",
            scratch=self._reads.scratch,
            sparse=self._reads.sparse,
            ahead=self._reads.ahead,
            dtype=self._model.dtype,
        )
        hidden = self._model.forward(token_ids[kv.token_indices], kv.positions, kv)
        last = kv.token_indices == len(token_ids) - 1
        logits = self._model.logits(hidden[last.to(hidden.device)]).cpu()
        torch.cuda.synchronize()
        return logits


def measure(context: RankContext, kv_cache_dtype: str, prefix_tokens: int) -> dict[str, Any]:
    """Seconds of each way, on this rank."""
    device = GpuRank(context).device
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    model, group = _model(device), _group(context)
    spec = pool_spec(model.config, PAGE_SIZE, kv_cache_dtype, torch.bfloat16)
    logical_pages = (prefix_tokens + max(NEW_TOKENS)) // PAGE_SIZE + 2
    logical_pages += -logical_pages % context.size
    shared = RankPools.make_on_gpus(spec, logical_pages // context.size, group, device)
    replicated = RankPools.make_replicated(spec, logical_pages, device)
    for pools in (shared, replicated):
        _fill(pools)
    torch.cuda.synchronize()
    group.barrier()
    ways = {"replicated": _Way(model, replicated, group, "local")}
    ways |= {name: _Way(model, shared, group, kv_read) for name, kv_read in READS.items()}
    pages = np.random.default_rng(0).permutation(logical_pages) + 1
    samples: dict[str, list[float]] = {}
    for new in NEW_TOKENS:
        generator = torch.Generator().manual_seed(new)
        token_ids = torch.randint(0, model.config.vocab_size, (new,), generator=generator)
        held = -(-(prefix_tokens + new) // PAGE_SIZE)
        span = BatchSpan(LogicalPages(pages[:held].astype(np.int64)), prefix_tokens, new)
        expected = ways["replicated"].first_token(span, token_ids)
        assert bool(expected.isfinite().all())
        for turn in range(WARM_UPS + ROUNDS):
            for name, way in ways.items():
                group.barrier()
                started = time.perf_counter()
                logits = way.first_token(span, token_ids)
                seconds = time.perf_counter() - started
                assert torch.equal(logits, expected), f"{name} differs from replicated"
                if turn >= WARM_UPS:
                    case = f"{kv_cache_dtype}, {prefix_tokens >> 10} K + {new}: {name}"
                    samples.setdefault(case, []).append(seconds)
    group.barrier()
    shared.close()
    replicated.close()
    return {"samples": samples}


def _fill(pools: RankPools) -> None:
    """Every page as if it had been computed: the same logical page has the same rows anywhere.

    No two rows are alike, for equal scores would be a tie at almost every query's threshold.
    """
    pool, layout = pools.pool, pools.layout
    spec, device = pool.spec, pool.buffer.tensor.device
    physical = np.arange(1, pool.physical_pages + 1)
    logical = np.asarray(layout.physical_pages_to_logical(physical, layout.cp_rank))
    widths = (SHAPE.kv_lora_rank, SHAPE.qk_rope_head_dim, SHAPE.index_head_dim)
    for first in range(0, int(logical.max()) + 1, FILLED_PAGES):
        here = (logical >= first) & (logical < first + FILLED_PAGES)
        rows = _tokens_of(logical[here] - first).to(device)
        slots = _tokens_of(physical[here]).to(device)
        for layer in range(spec.num_layers):
            generator = torch.Generator(device).manual_seed(first * LAYERS + layer)
            shape = (FILLED_PAGES * PAGE_SIZE, sum(widths))
            values = torch.randn(shape, generator=generator, device=device)[rows]
            latent, k_pe, index_k = values.split(widths, dim=1)
            spec.latent.scatter_rows(
                pool.pages("latent", layer), slots, spec.latent.encode(latent, k_pe)
            )
            spec.index.scatter_rows(pool.pages("index", layer), slots, spec.index.encode(index_k))


def _tokens_of(pages: npt.NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy((pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1))


BENCHMARK = Benchmark(
    "gpu_time_to_first_token", "first token after a cached prefix: shared against replicated", run
)

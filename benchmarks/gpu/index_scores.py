"""Index scores of one GPU: our kernel, on keys in bf16 and in e4m3, against DeepGEMM's.

At DeepSeek-V3.2's widths, 64 heads of 128. Everything starts from what the model has, so the
queries' way to e4m3 is in the time of both that need it; decoding keys to bf16 is a sample of its
own. Without DeepGEMM ours are measured alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.gpu.clock import GpuClock
from benchmarks.gpu.workload import INDEX
from cp_shared_kv.memory.formats.block_fp8 import dequantise
from cp_shared_kv.model.ops import gpu, hopper

HEADS = 64
QUERIES = (64, 256, 1024, 4096)
KEYS = (1 << 13, 1 << 15, 1 << 17, 1 << 20)
MOST_SCORES = 1 << 29
"""Of one call, 2 GB; an operation is as many calls as its queries take."""
SHORT_SCORES = 1 << 31
"""An operation is repeated in a sample until it has so many."""
ROUNDS = 7
AT_MOST = 2.0
"""Times DeepGEMM's."""
_Way = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Queries and head weights to scores."""
CHECKED_QUERIES, CHECKED_KEYS = 64, 1 << 13
PLAIN, CODES, DEEP_GEMM = "Triton, bf16", "Triton, e4m3", "DeepGEMM"


def run(progress: Progress) -> Measurement:
    """Check each way on fresh random values, then time it."""
    has_deep_gemm = importlib.util.find_spec("deep_gemm") is not None
    cases = [(queries, keys) for keys in KEYS for queries in QUERIES]
    samples: dict[str, list[float]] = {}
    errors: dict[str, object] = {}
    for done, (queries, keys) in enumerate(cases):
        case = f"{queries} queries, {keys >> 10} K"
        progress(case, done, len(cases))
        values = _Values(queries, keys, seed=done)
        ways = values.ways(has_deep_gemm)
        errors[case] = {name: values.error(name, ways) for name in ways}
        clock = GpuClock()
        repeats = min(8, max(1, SHORT_SCORES // (queries * keys)))
        for name, way in ways.items():
            clock.capture(name, partial(values.all_queries, way), 1, repeats)
        clock.capture("decoding keys", values.decode, 1, repeats)
        samples |= {f"{case}: {name}": taken for name, taken in clock.samples(ROUNDS).items()}
        torch.cuda.empty_cache()
    progress("", len(cases), len(cases))
    goals = [
        Goal(f"{case}: {name}", AT_MOST, f"{case}: {DEEP_GEMM}")
        for case in (errors if has_deep_gemm else ())
        for name in (CODES, PLAIN)
    ]
    config: dict[str, object] = {"rounds": ROUNDS, "heads": HEADS, "width": INDEX}
    return Measurement(config, samples, goals, {"relative_errors": errors})


class _Values:
    """Random queries, head weights, and keys in both forms."""

    def __init__(self, queries: int, keys: int, seed: int) -> None:
        device = torch.device("cuda")
        draw = partial(
            torch.randn, device=device, generator=torch.Generator(device).manual_seed(seed)
        )
        self.q = draw(queries, HEADS, INDEX).bfloat16()
        self.weights = draw(queries, HEADS)
        largest = draw(keys, INDEX).clamp(-4, 4) * 100
        self.codes = largest.to(torch.float8_e4m3fn).view(torch.uint8)
        self.scales = draw(keys).abs() / 100
        self.keys = dequantise(self.codes, self.scales.unsqueeze(1), torch.bfloat16)

    def ways(self, has_deep_gemm: bool) -> dict[str, _Way]:
        """Each by its name: queries from start to stop against all keys."""
        ways: dict[str, _Way] = {
            PLAIN: lambda q, weights: gpu.index_scores(q, weights, self.keys),
            CODES: lambda q, weights: gpu.index_scores_fp8(q, weights, self.codes, self.scales),
        }
        if has_deep_gemm:
            kernel = importlib.import_module("deep_gemm").fp8_mqa_logits
            ways[DEEP_GEMM] = lambda q, weights: hopper.index_scores_fp8(
                kernel, q, weights, self.codes, self.scales
            )
        return ways

    def all_queries(self, way: _Way, _turn: int) -> None:
        at_once = max(1, MOST_SCORES // len(self.codes))
        for q, weights in zip(self.q.split(at_once), self.weights.split(at_once), strict=True):
            way(q, weights)

    def decode(self, _turn: int) -> None:
        dequantise(self.codes, self.scales.unsqueeze(1), torch.bfloat16)

    def error(self, name: str, ways: dict[str, _Way]) -> float:
        """Of some scores against the equation in fp64 on unrounded queries, relative in norm."""
        q, weights = self.q[-CHECKED_QUERIES:], self.weights[-CHECKED_QUERIES:]
        got = ways[name](q, weights)[:, -CHECKED_KEYS:]
        codes, scales = self.codes[-CHECKED_KEYS:], self.scales[-CHECKED_KEYS:]
        keys = codes.view(torch.float8_e4m3fn).double() * scales.double().unsqueeze(1)
        total = torch.zeros(got.shape, dtype=torch.float64, device=got.device)
        for head in range(HEADS):
            products = (q[:, head].double() @ keys.T).relu_()
            total += products * weights[:, head : head + 1].double()
        return float((got - total).norm() / total.norm())


BENCHMARK = Benchmark("gpu_index_scores", "index scores by our kernels against DeepGEMM", run)

"""How near the models are to Hugging Face transformers: architecture x split x N x page format.

Three comparisons of every run (a model, a case, a number of ranks and a split):

* with transformers in fp32. With fp32 pages it is judged. transformers knows none of the other
  formats' roundings, so beside those the distance is a figure and no verdict;
* with one rank and the same page format. The formats round alike there, yet sums of another order
  may bring a value to the other side of a rounding step, so this is a figure too;
* with the same ranks that all store every page. What shares its pages must give the same bits. That
  doubles the runs, so the models for the page formats do it, with fp32 as one format of theirs.

The figures stand in the result's config: "table" has a row for each model, format, number of ranks
and split, over all cases and seeds; "agreement" a row for each run. The times beside them are those
of whole runs, loading included, and no measure of speed. docs/generate_oracle.py makes the page.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import Benchmark, Measurement, Progress
from benchmarks.oracle_table import EXACT_PAGES, RELATIVE_ERROR_BOUND, is_decided, met, table
from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.engine.config_values import KVCacheDtype
from cp_shared_kv.engine.model_spec import pool_spec
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.testing.bitwise import first_difference
from cp_shared_kv.testing.model_on_ranks import ComputedRows
from cp_shared_kv.testing.oracle_cases import (
    NEW_TOKENS,
    ORACLE_SHAPES,
    PAGE_FORMAT_SHAPES,
    PROMPT_TOKENS,
    oracle_schedules,
    prompt,
)
from cp_shared_kv.testing.rank_pool import RankPool
from cp_shared_kv.testing.routing_margin import SURE_ROUTING_MARGIN
from cp_shared_kv.testing.schedule import Schedule

SEEDS = (0, 1)
# One rank first: the others of a case are compared with it.
GROUPS = [
    (1, "in-seq-split"),
    (2, "in-seq-split"),
    (2, "round-robin-split"),
    (4, "in-seq-split"),
    (4, "round-robin-split"),
]
MODELS: dict[str, tuple[ModelShape, tuple[KVCacheDtype, ...]]] = {
    **{name: (shape, ("fp32",)) for name, shape in ORACLE_SHAPES.items()},
    **PAGE_FORMAT_SHAPES,
}


@dataclass(frozen=True)
class Model:
    """One checkpoint, transformers on it, and the cases."""

    name: str
    seed: int
    checkpoint: Path
    oracle: Any
    schedules: dict[str, Schedule]
    kv_cache_dtypes: tuple[KVCacheDtype, ...]

    def page_formats(self, kv_cache_dtype: KVCacheDtype) -> str:
        """Names of the formats of latent KV and of index K."""
        config = ModelConfig.from_directory(self.checkpoint)
        spec = pool_spec(config, 64, kv_cache_dtype, torch.float32)
        return f"{spec.latent.name}, {spec.index.name}"


def run(progress: Progress) -> Measurement:
    """Run every case, for models of several seeds."""
    # Imported here: transformers takes seconds, and `--list` imports every benchmark.
    from cp_shared_kv.testing.transformers_oracle import SURE_MARGIN

    agreement: list[dict[str, Any]] = []
    seconds: dict[str, list[float]] = {}
    total = len(SEEDS) * sum(len(formats) for _, formats in MODELS.values())
    done = 0
    with RankPool(4) as pool, tempfile.TemporaryDirectory() as folder:
        for model in _models(Path(folder)):
            for kv_cache_dtype in model.kv_cache_dtypes:
                for case in model.schedules:
                    name = f"{model.name}, {kv_cache_dtype} pages, {case}"
                    progress(f"seed {model.seed}, {name}", done, total)
                    started = time.perf_counter()
                    agreement += _case(pool, model, kv_cache_dtype, case)
                    seconds.setdefault(name, []).append(time.perf_counter() - started)
                done += 1
    progress("done", total, total)
    judged = [run for run in agreement if run["pages"] == EXACT_PAGES and is_decided(run)]
    rows = table(agreement)
    config: dict[str, object] = {
        "shapes": {name: asdict(shape) for name, (shape, _) in MODELS.items()},
        "seeds": SEEDS,
        "dtype": "float32",
        "longest_request_tokens": PROMPT_TOKENS + NEW_TOKENS,
        "transformers": version("transformers"),
        "relative_error_bound": RELATIVE_ERROR_BOUND,
        "sure_margin": SURE_MARGIN,
        "sure_routing_margin": SURE_ROUTING_MARGIN,
        "worst_relative_error": max(run["relative_error"] for run in judged),
        "all_met": all(row["met"] for row in rows),
        "near_ties": sum(row["near_ties"] for row in rows),
        "table": rows,
        "agreement": agreement,
    }
    return Measurement(config, seconds)


def _models(folder: Path) -> Iterator[Model]:
    from cp_shared_kv.testing.transformers_oracle import TransformersOracle

    for name, (shape, formats) in MODELS.items():
        for seed in SEEDS:
            checkpoint = folder / "model"
            make_tiny_checkpoint(checkpoint, shape, seed)
            oracle = TransformersOracle(checkpoint)
            schedules = oracle_schedules(oracle.generate(prompt(1, PROMPT_TOKENS), NEW_TOKENS))
            yield Model(name, seed, checkpoint, oracle, schedules, formats)


def _case(
    pool: RankPool, model: Model, kv_cache_dtype: KVCacheDtype, case: str
) -> list[dict[str, Any]]:
    """One case on every group."""
    schedule = model.schedules[case]
    requests = [request.token_ids for request in schedule.requests]
    one_rank: ComputedRows | None = None
    runs: list[dict[str, Any]] = []
    for cp_size, split in GROUPS:
        computed = _computed(pool, model.checkpoint, kv_cache_dtype, cp_size, split, schedule)
        one_rank = one_rank or computed
        same_bits = None
        if cp_size > 1 and model.name in PAGE_FORMAT_SHAPES:
            every_page = _computed(
                pool, model.checkpoint, kv_cache_dtype, cp_size, split, schedule, shared=False
            )
            same_bits = first_difference(computed.logits, every_page.logits) is None
        found = {
            "model": model.name,
            "pages": model.page_formats(kv_cache_dtype),
            "cp_size": cp_size,
            "split": split,
            "seed": model.seed,
            "case": case,
            **asdict(model.oracle.compare(computed, requests)),
            "one_rank_error": _relative_error(computed, one_rank),
            "greedy_as_one_rank": _same_greedy(computed, one_rank),
            "same_bits_as_replicated": same_bits,
        }
        runs.append(found | {"met": met(found)})
    return runs


def _relative_error(computed: ComputedRows, reference: ComputedRows) -> float:
    return float((computed.logits - reference.logits).norm() / reference.logits.norm())


def _same_greedy(computed: ComputedRows, reference: ComputedRows) -> int:
    return int((computed.logits.argmax(1) == reference.logits.argmax(1)).sum())


def _computed(
    pool: RankPool,
    checkpoint: Path,
    kv_cache_dtype: KVCacheDtype,
    cp_size: int,
    split: str,
    schedule: Schedule,
    *,
    shared: bool = True,
) -> ComputedRows:
    with tempfile.TemporaryDirectory() as folder:
        pool.run(
            "cp_shared_kv.testing.model_on_ranks:compute_on_rank",
            size=cp_size,
            checkpoint=str(checkpoint),
            schedule=msgspec.to_builtins(schedule),
            split=split,
            directory=folder,
            kv_cache_dtype=kv_cache_dtype,
            shared=shared,
        )
        files = [Path(folder) / f"rank{rank}.safetensors" for rank in range(cp_size)]
        return ComputedRows.merged([ComputedRows.load(file) for file in files])


BENCHMARK = Benchmark(
    "oracle",
    "distance from Hugging Face transformers, and same bits: model x N x split x page format",
    run,
)

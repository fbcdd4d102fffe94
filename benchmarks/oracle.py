"""How near the models are to Hugging Face transformers: every case, 1, 2 and 4 ranks, both splits.

The figures stand in the result's config: "table" has a row for each model, number of ranks and
split, over all cases and seeds; "agreement" a row for each run. The times beside them are those of
whole runs, loading included, and no measure of speed.

A random model may have two experts so nearly tied for some row that rounding decides which one
wins, and the row comes out different as a whole. transformers' own margins tell. Runs over such a
row stay in "agreement", where they may be far off, and are counted in the table as near ties, apart
from the others.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import Benchmark, Measurement, Progress
from cp_shared_kv.testing.model_on_ranks import ComputedRows
from cp_shared_kv.testing.oracle_cases import (
    NEW_TOKENS,
    ORACLE_SHAPES,
    PROMPT_TOKENS,
    oracle_schedules,
    prompt,
)
from cp_shared_kv.testing.rank_pool import RankPool
from cp_shared_kv.testing.routing_margin import SURE_ROUTING_MARGIN
from cp_shared_kv.testing.schedule import Schedule
from cp_shared_kv.testing.tiny_models import make_tiny_checkpoint

RELATIVE_ERROR_BOUND = 2e-6
SEEDS = (0, 1, 2)
GROUPS = [
    (1, "in-seq-split"),
    (2, "in-seq-split"),
    (2, "round-robin-split"),
    (4, "in-seq-split"),
    (4, "round-robin-split"),
]
_WORST = ("relative_error", "worst_row_error")
_SUMS = (
    *("rows", "greedy_agreeing"),
    *("sparse_rows", "rows_agreeing"),
    *("sure_rows", "sure_rows_agreeing"),
)


def run(progress: Progress) -> Measurement:
    """Compare every case with transformers, for models of several seeds."""
    # Imported here: transformers takes seconds, and `--list` imports every benchmark.
    from cp_shared_kv.testing.transformers_oracle import SURE_MARGIN, TransformersOracle

    agreement: list[dict[str, Any]] = []
    seconds: dict[str, list[float]] = {}
    with RankPool(4) as pool, tempfile.TemporaryDirectory() as folder:
        models = [(name, seed) for name in ORACLE_SHAPES for seed in SEEDS]
        for number, (model, seed) in enumerate(models):
            checkpoint = Path(folder) / f"model{number}"
            make_tiny_checkpoint(checkpoint, ORACLE_SHAPES[model], seed)
            oracle = TransformersOracle(checkpoint)
            schedules = oracle_schedules(oracle.generate(prompt(1, PROMPT_TOKENS), NEW_TOKENS))
            total = len(models) * len(GROUPS) * len(schedules)
            for cp_size, split in GROUPS:
                for case, schedule in schedules.items():
                    name = f"{model}: N={cp_size} {split}, {case}"
                    progress(f"seed {seed}, {name}", len(agreement), total)
                    started = time.perf_counter()
                    computed = _computed(pool, checkpoint, cp_size, split, schedule)
                    seconds.setdefault(name, []).append(time.perf_counter() - started)
                    found = oracle.compare(computed, [r.token_ids for r in schedule.requests])
                    settings = {"model": model, "cp_size": cp_size, "split": split}
                    met = (
                        found.relative_error <= RELATIVE_ERROR_BOUND
                        and found.sure_rows_agreeing == found.sure_rows
                        and found.greedy_agreeing == found.rows
                    )
                    row = {**settings, "seed": seed, "case": case, **asdict(found), "met": met}
                    agreement.append(row)
    progress("done", len(agreement), len(agreement))
    decided = [run for run in agreement if _decided(run)]
    config = {
        "shapes": {name: asdict(shape) for name, shape in ORACLE_SHAPES.items()},
        "dtype": "float32",
        "transformers": version("transformers"),
        "relative_error_bound": RELATIVE_ERROR_BOUND,
        "sure_margin": SURE_MARGIN,
        "sure_routing_margin": SURE_ROUTING_MARGIN,
        "worst_relative_error": max(run["relative_error"] for run in decided),
        "all_met": all(run["met"] for run in decided),
        "near_ties": len(agreement) - len(decided),
        "table": _table(agreement),
        "agreement": agreement,
    }
    return Measurement(config, seconds)


def _table(agreement: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each model, number of ranks and split: the worst of its runs, and their sums."""
    rows: list[dict[str, Any]] = []
    for model in ORACLE_SHAPES:
        for cp_size, split in GROUPS:
            settings = {"model": model, "cp_size": cp_size, "split": split}
            every = [run for run in agreement if settings.items() <= run.items()]
            runs = [run for run in every if _decided(run)]
            counts = {"runs": len(runs), "near_ties": len(every) - len(runs)}
            worst = {name: max(run[name] for run in runs) for name in _WORST}
            sums = {name: sum(run[name] for run in runs) for name in _SUMS}
            met = all(run["met"] for run in runs)
            rows.append({**settings, **counts, **worst, **sums, "met": met})
    return rows


def _decided(run: dict[str, Any]) -> bool:
    """Is no choice of experts so near that rounding could turn it?"""
    return run["least_routing_margin"] > SURE_ROUTING_MARGIN


def _computed(
    pool: RankPool, checkpoint: Path, cp_size: int, split: str, schedule: Schedule
) -> ComputedRows:
    with tempfile.TemporaryDirectory() as folder:
        pool.run(
            "cp_shared_kv.testing.model_on_ranks:compute_on_rank",
            size=cp_size,
            checkpoint=str(checkpoint),
            schedule=msgspec.to_builtins(schedule),
            split=split,
            directory=folder,
        )
        files = [Path(folder) / f"rank{rank}.safetensors" for rank in range(cp_size)]
        return ComputedRows.merged([ComputedRows.load(file) for file in files])


BENCHMARK = Benchmark(
    "oracle",
    "relative error and top-k agreement with Hugging Face transformers: model x N x split",
    run,
)

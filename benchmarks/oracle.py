"""How near the model is to Hugging Face transformers: every case, on 1, 2 and 4 ranks, both splits.

The figures stand in the result's config, under "agreement", a row a run. The times beside them
are those of whole runs, loading included, and no measure of speed.
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
    ORACLE_SHAPE,
    PROMPT_TOKENS,
    oracle_schedules,
    prompt,
)
from cp_shared_kv.testing.rank_pool import RankPool
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


def run(progress: Progress) -> Measurement:
    """Compare every case with transformers, for models of several seeds."""
    # Imported here: transformers takes seconds, and `--list` imports every benchmark.
    from cp_shared_kv.testing.transformers_oracle import SURE_MARGIN, TransformersOracle

    agreement: list[dict[str, Any]] = []
    seconds: dict[str, list[float]] = {}
    with RankPool(4) as pool, tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            checkpoint = Path(folder) / f"model{seed}"
            make_tiny_checkpoint(checkpoint, ORACLE_SHAPE, seed)
            oracle = TransformersOracle(checkpoint)
            schedules = oracle_schedules(oracle.generate(prompt(1, PROMPT_TOKENS), NEW_TOKENS))
            total = len(SEEDS) * len(GROUPS) * len(schedules)
            for cp_size, split in GROUPS:
                for case, schedule in schedules.items():
                    name = f"N={cp_size} {split}, {case}"
                    progress(f"seed {seed}, {name}", len(agreement), total)
                    started = time.perf_counter()
                    computed = _computed(pool, checkpoint, cp_size, split, schedule)
                    seconds.setdefault(name, []).append(time.perf_counter() - started)
                    found = oracle.compare(computed, [r.token_ids for r in schedule.requests])
                    settings = {"seed": seed, "cp_size": cp_size, "split": split, "case": case}
                    met = (
                        found.relative_error <= RELATIVE_ERROR_BOUND
                        and found.sure_rows_agreeing == found.sure_rows
                        and found.greedy_agreeing == found.rows
                    )
                    agreement.append({**settings, **asdict(found), "met": met})
    progress("done", len(agreement), len(agreement))
    config = {
        "shape": asdict(ORACLE_SHAPE),
        "dtype": "float32",
        "transformers": version("transformers"),
        "relative_error_bound": RELATIVE_ERROR_BOUND,
        "sure_margin": SURE_MARGIN,
        "worst_relative_error": max(row["relative_error"] for row in agreement),
        "all_met": all(row["met"] for row in agreement),
        "agreement": agreement,
    }
    return Measurement(config, seconds)


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
    "relative error and top-k agreement with Hugging Face transformers, N = 1, 2, 4, both splits",
    run,
)

"""One JSON for each run of a benchmark: enough to judge the figures, and to run it again."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

import cp_shared_kv
from benchmarks import Goal, Measurement

RESULTS = Path(__file__).parent / "results"
_REPOSITORY = Path(__file__).parents[1]


def record(
    name: str, measurement: Measurement, directory: Path = RESULTS, commit: str | None = None
) -> Path:
    """Write the run to `directory` and return the file's path. Times are in seconds.

    `commit` is for a copy of the sources without git.
    """
    now = datetime.now(UTC)
    changes = _git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    content = {
        "benchmark": name,
        "recorded_at": now.isoformat(timespec="seconds"),
        "commit": commit or this_commit(),
        "uncommitted_changes": None if changes is None else bool(changes),
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "numpy")},
            "cp-shared-kv": cp_shared_kv.__version__,
            **_gpu_versions(),
        },
        "machine": {**_machine(), **_gpus()},
        "config": measurement.config,
        "figures": measurement.figures,
        "summary_seconds": {
            sample: {
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
                "count": len(values),
            }
            for sample, values in measurement.samples_seconds.items()
        },
        "goals": [judge(goal, measurement.samples_seconds) for goal in measurement.goals],
        "samples_seconds": measurement.samples_seconds,
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{now:%Y%m%dT%H%M%SZ}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def this_commit() -> str | None:
    """The commit of this checkout; None in a copy that is none."""
    return _git("rev-parse", "HEAD")


def judge(goal: Goal, samples_seconds: dict[str, list[float]]) -> dict[str, object]:
    """The goal beside what was measured.

    The figure is a ratio of medians, or the median in seconds; `min` and `max` are over the
    rounds, each sample divided by the one of the same round, so both need equally many.
    """
    values = samples_seconds[goal.sample]
    base = samples_seconds[goal.against] if goal.against else [1.0] * len(values)
    figure = statistics.median(values) / statistics.median(base)
    rounds = [value / other for value, other in zip(values, base, strict=True)]
    return {
        "sample": goal.sample,
        "against": goal.against,
        "figure": round(figure, 4),
        "min": round(min(rounds), 4),
        "max": round(max(rounds), 4),
        "at_most": goal.at_most,
        "met": figure <= goal.at_most,
    }


def _machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return {
        "cpu": ", ".join(sorted(models)) or platform.machine(),
        "cores": sum(line.startswith("processor") for line in lines),
        "cores_usable": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        # Above the number of cores, others took part of the time: trust the figures less.
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def _gpus() -> dict[str, object]:
    """The GPUs by name; nothing without one."""
    if not torch.cuda.is_available():
        return {}
    count = torch.cuda.device_count()
    return {"gpus": [torch.cuda.get_device_name(index) for index in range(count)]}


def _gpu_versions() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {}
    return {
        "triton": version("triton"),
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
    }


def _git(*arguments: str) -> str | None:
    """What git says of this checkout; None where there is no git or no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(_REPOSITORY), *arguments], capture_output=True, text=True, timeout=30
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None

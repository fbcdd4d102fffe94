"""Measurements of what the project promises. `python -m benchmarks --list` names them.

A benchmark is a module of this package with a `BENCHMARK`; nothing else registers it. Each run
leaves one JSON under benchmarks/results (see record.py).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field

Progress = Callable[[str, int, int], None]
"""Told by a running benchmark: what it is at, steps done, steps in all."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on the median time of `sample`: as a ratio to `against`, or in seconds without."""

    sample: str
    at_most: float
    against: str | None = None


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a run found: raw samples by name, under which settings, and what they should keep."""

    config: dict[str, object]
    samples_seconds: dict[str, list[float]]
    goals: list[Goal] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One measurement that can be run by name."""

    name: str
    summary: str
    run: Callable[[Progress], Measurement]


def registered() -> dict[str, Benchmark]:
    """Every benchmark of the package, by name."""
    found: dict[str, Benchmark] = {}
    for module_info in pkgutil.walk_packages(__path__, prefix=f"{__name__}."):
        if module_info.name == f"{__name__}.__main__":
            continue
        benchmark = getattr(importlib.import_module(module_info.name), "BENCHMARK", None)
        if isinstance(benchmark, Benchmark):
            if benchmark.name in found:
                raise ValueError(f"two benchmarks are named {benchmark.name!r}; rename one")
            found[benchmark.name] = benchmark
    return found

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
    figures: dict[str, object] = field(default_factory=dict)
    """What was found beside times: counts, bytes, whether bits were equal."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One measurement that can be run by name."""

    name: str
    summary: str
    run: Callable[[Progress], Measurement]


def registered(package: str = "") -> dict[str, Benchmark]:
    """Every benchmark that runs on CPUs, by name; or those of a package, such as ".gpu"."""
    found: dict[str, Benchmark] = {}
    root = importlib.import_module(f"{__name__}{package}")
    for module_info in pkgutil.walk_packages(root.__path__, prefix=f"{root.__name__}."):
        name = module_info.name
        if name.endswith(".__main__") or (not package and name.startswith(f"{__name__}.gpu")):
            continue
        benchmark = getattr(importlib.import_module(name), "BENCHMARK", None)
        if isinstance(benchmark, Benchmark):
            if benchmark.name in found:
                raise ValueError(f"two benchmarks are named {benchmark.name!r}; rename one")
            found[benchmark.name] = benchmark
    return found

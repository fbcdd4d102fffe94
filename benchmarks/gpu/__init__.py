"""Measurements on NVIDIA GPUs: `python -m benchmarks.gpu` (make bench-gpu).

One process a GPU, in a `RankPool`. Each measurement is a module with a `BENCHMARK`, as on CPUs,
and its `run` has the ranks time the same rounds; a sample is the slowest rank's.
"""

from __future__ import annotations

import os

RANKS = int(os.environ.get("BENCH_RANKS", "2"))
"""GPUs that the measurements run on, one rank each."""

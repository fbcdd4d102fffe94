"""Tests that need NVIDIA GPUs: skipped where there are none, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cp_shared_kv.kernels.needs import missing_for_gpus
from cp_shared_kv.testing.rank_pool import RankPool


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The first GPU."""
    if missing := missing_for_gpus(1):
        pytest.skip(missing)
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator[RankPool]:
    """Two rank processes, each with a GPU of its own."""
    if missing := missing_for_gpus(2):
        pytest.skip(missing)
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Two rank processes, on two GPUs or on the only one, see cp_shared_kv.testing.one_gpu."""
    if missing := missing_for_gpus(1):
        pytest.skip(missing)
    with RankPool(2) as pool:
        yield pool

"""Pools in plain CUDA memory that all ranks map, and a layer's prefix read ahead of its use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cp_shared_kv.testing.gpu import missing_for_gpus
from cp_shared_kv.testing.rank_pool import RankPool

pytestmark = pytest.mark.gpu

RANKS_FILE = Path(__file__).with_name("mapped_ranks.py")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two rank processes, on two GPUs or on the only one."""
    if missing := missing_for_gpus(1):
        pytest.skip(missing)
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize("latent", ["bf16", "fp8_ds_mla"])
def test_layers_read_ahead_are_as_their_owners_wrote_them(ranks: RankPool, latent: str) -> None:
    for result in ranks.run(f"{RANKS_FILE}:check_layers", timeout_seconds=120, latent=latent):
        assert result == {"zero_before": True, "wrong": [], "own_distance": 0}

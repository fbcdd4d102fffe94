"""Pools in plain CUDA memory that all ranks map, and a layer's prefix read ahead of its use."""

from __future__ import annotations

from pathlib import Path

import pytest

from cp_shared_kv.testing.rank_pool import RankPool

pytestmark = pytest.mark.gpu

RANKS_FILE = Path(__file__).with_name("mapped_ranks.py")


@pytest.mark.parametrize("latent", ["bf16", "fp8_ds_mla"])
def test_layers_read_ahead_are_as_their_owners_wrote_them(ranks: RankPool, latent: str) -> None:
    for result in ranks.run(f"{RANKS_FILE}:check_layers", timeout_seconds=120, latent=latent):
        assert result == {"zero_before": True, "wrong": [], "own_distance": 0}

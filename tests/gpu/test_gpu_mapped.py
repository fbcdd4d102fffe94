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


def test_scratch_that_was_outgrown_is_given_back(ranks: RankPool) -> None:
    for result in ranks.run(f"{RANKS_FILE}:check_outgrown", timeout_seconds=120):
        assert result["held"] == pytest.approx(1, abs=0.1)
        assert result["after"] == pytest.approx(0, abs=0.1)


def test_one_rank_that_cannot_map_stops_all_and_leaves_nothing(ranks: RankPool) -> None:
    results = ranks.run(f"{RANKS_FILE}:check_unmappable", timeout_seconds=120)

    for result in results:
        assert "this rank cannot map" in result["said"] or "map its peers" in result["said"]
        assert result["left"] == pytest.approx(0, abs=0.2)
    assert len(results) == 2

"""Between GPUs: pull, push, full view and selected rows give the bytes once written."""

from __future__ import annotations

from pathlib import Path

import pytest

from cp_shared_kv.testing.rank_pool import RankPool
from cp_shared_kv.testing.rank_process import load

pytestmark = pytest.mark.gpu

RANKS_FILE = Path(__file__).with_name("gpu_ranks.py")
CPU_STORIES = Path(__file__).parents[1] / "ranks/test_shared_reads.py"
PHYSICAL_PAGES = 24
PAGE_SIZE = 16
FORMATS = [["bf16", "fp8_scaled"], ["fp8_ds_mla", "fp8_scaled"], ["fp32", "fp32"]]


def long_story() -> list[list[dict[str, object]]]:
    free = load(f"{CPU_STORIES}:shuffled")(2 * PHYSICAL_PAGES, seed=2)
    return load(f"{CPU_STORIES}:long_story")(PAGE_SIZE, free)


@pytest.mark.parametrize("formats", FORMATS, ids="+".join)
@pytest.mark.parametrize("split", ["in-seq-split", "round-robin-split"])
def test_every_read_gives_the_bytes_once_written(
    ranks: RankPool, formats: list[str], split: str
) -> None:
    for result in ranks.run(
        f"{RANKS_FILE}:check_story",
        timeout_seconds=120,
        formats=formats,
        physical_pages=PHYSICAL_PAGES,
        story=long_story(),
        split=split,
    ):
        assert result["wrong"] == []
        assert result["compared"] > 1000
        assert result["selected"] > 500
        pages = result["pages"]
        assert pages["pull"] == pages["push"] == pages["pull or push"] == pages["full view"] > 0
        assert pages["pull ahead"] == pages["push ahead"] == pages["pull"]


def test_a_rank_that_lags_behind_on_its_gpu_is_waited_for(ranks: RankPool) -> None:
    for result in ranks.run(
        f"{RANKS_FILE}:check_story",
        timeout_seconds=120,
        formats=FORMATS[0],
        physical_pages=PHYSICAL_PAGES,
        story=long_story(),
        split="in-seq-split",
        dawdle=True,
    ):
        assert result["wrong"] == []


def test_if_no_rank_waited_the_lag_would_show(ranks: RankPool) -> None:
    results = ranks.run(
        f"{RANKS_FILE}:check_story",
        timeout_seconds=120,
        formats=FORMATS[0],
        physical_pages=PHYSICAL_PAGES,
        story=long_story(),
        split="in-seq-split",
        dawdle=True,
        wait_for_peers=False,
    )
    assert any(result["wrong"] for result in results)


def test_a_peer_reads_in_place_what_was_written_before_the_barrier(gpu_ranks: RankPool) -> None:
    for result in gpu_ranks.run(f"{RANKS_FILE}:check_in_place"):
        assert result == {"zero_before": True, "seen": [1, 2], "own_distance": 0}


def test_peers_that_cannot_be_mapped_are_named_once_and_get_private_memory(
    gpu_ranks: RankPool, tmp_path: Path
) -> None:
    results = gpu_ranks.run(f"{RANKS_FILE}:check_fallback", log=str(tmp_path / "log"))
    assert [result["kind"] for result in results] == ["PrivateBuffer"] * 2
    assert all(result["on_gpu"] for result in results)
    assert "two ranks use one GPU" in results[0]["log"]
    assert results[1]["log"] == ""

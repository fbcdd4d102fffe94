"""/metrics of a running cluster is the catalogue, whole, and its figures are those of the pools."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from cp_shared_kv.telemetry import CATALOGUE
from cp_shared_kv.testing.running_cluster import CP_SIZE, PHYSICAL_TOKENS, Running

pytestmark = pytest.mark.e2e

PAGES_A_RANK = PHYSICAL_TOKENS // 64


def scraped(served: Running) -> dict[str, list[Sample]]:
    """Samples by family, as Prometheus would take them."""
    families = text_string_to_metric_families(served.get("/metrics").text)
    return {family.name: family.samples for family in families}


@pytest.fixture
def after_a_prompt(served: Running) -> dict[str, list[Sample]]:
    """Of a prompt larger than one rank, twice: so that its prefix was sent, cached and read."""
    for _ in range(2):
        body = {"model": "demo", "prompt": "metrics " * 180, "max_tokens": 3}
        assert served.post(body).status_code == 200
    served.until_nothing_is_held()
    return scraped(served)


def by_rank(samples: list[Sample]) -> list[float]:
    ranked = sorted(samples, key=lambda sample: int(sample.labels["cp_rank"]))
    assert [sample.labels["cp_rank"] for sample in ranked] == [str(r) for r in range(CP_SIZE)]
    return [sample.value for sample in ranked]


def test_what_is_exposed_is_the_catalogue_and_nothing_else(
    after_a_prompt: dict[str, list[Sample]],
) -> None:
    assert set(after_a_prompt) == {metric.name.removesuffix("_total") for metric in CATALOGUE}
    # Nothing has been restarted, so no unit has a count.
    silent = [name for name, samples in after_a_prompt.items() if not samples]
    assert silent == ["cpkv:restarts"]


def test_pages_of_an_owner_are_free_cached_or_locked(
    after_a_prompt: dict[str, list[Sample]],
) -> None:
    free, cached, locked = (
        by_rank(after_a_prompt[f"cpkv:owner_{state}_pages"])
        for state in ("free", "cached", "locked")
    )
    assert locked == [0] * CP_SIZE
    assert min(cached) >= 180 * 8 // 64 // CP_SIZE
    assert [f + c for f, c in zip(free, cached, strict=True)] == [PAGES_A_RANK] * CP_SIZE
    (evictable,) = after_a_prompt["sglang:kv_evictable_tokens"]
    assert sum(cached) * 64 == evictable.value


def test_each_rank_has_read_the_prefix_that_was_found(
    served: Running, after_a_prompt: dict[str, list[Sample]]
) -> None:
    before = by_rank(after_a_prompt["cpkv:read_bytes"])
    assert (
        served.post(
            {"model": "demo", "prompt": "metrics " * 180 + "more", "max_tokens": 2}
        ).status_code
        == 200
    )
    served.until_nothing_is_held()
    after = by_rank(scraped(served)["cpkv:read_bytes"])
    grown = [late - early for late, early in zip(after, before, strict=True)]
    assert min(grown) > 0
    assert len(set(grown)) == 1  # every rank reads all of a prefix, its own pages among them

"""Which of the oracle's runs are judged, and what a row of the table says."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.oracle_table import is_decided, met, table


def a_run(**changes: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "pages": "fp32, fp32",
        "cp_size": 2,
        "split": "in-seq-split",
        "rows": 10,
        "greedy_agreeing": 10,
        "greedy_as_one_rank": 10,
        "relative_error": 1e-6,
        "worst_row_error": 2e-6,
        "one_rank_error": 3e-7,
        "sparse_rows": 8,
        "rows_agreeing": 8,
        "sure_rows": 7,
        "sure_rows_agreeing": 7,
        "least_routing_margin": 1e-4,
        "same_bits_as_replicated": True,
    } | changes


def rows_of(*runs: dict[str, Any]) -> list[dict[str, Any]]:
    return table([run | {"met": met(run)} for run in runs])


@pytest.mark.parametrize(
    ("change", "decided"),
    [
        ({}, True),
        ({"least_routing_margin": 1e-7}, False),
        # Only a row within the margin selected another set.
        ({"rows_agreeing": 7}, False),
        # A row that is sure selected another set: no tie, but a mistake.
        ({"rows_agreeing": 7, "sure_rows_agreeing": 6}, True),
        ({"pages": "bf16, bf16", "rows_agreeing": 3, "least_routing_margin": 1e-7}, True),
    ],
)
def test_a_near_tie_decides_only_what_it_can(change: dict[str, Any], decided: bool) -> None:
    assert is_decided(a_run(**change)) is decided


@pytest.mark.parametrize("pages", ["fp32, fp32", "bf16, bf16"])
@pytest.mark.parametrize(
    ("change", "of_fp32_alone"),
    [
        ({"same_bits_as_replicated": False}, False),
        ({"greedy_as_one_rank": 9}, False),
        ({"relative_error": 3e-6}, True),
        ({"sure_rows_agreeing": 6}, True),
        ({"greedy_agreeing": 9}, True),
    ],
)
def test_what_misses(pages: str, change: dict[str, Any], of_fp32_alone: bool) -> None:
    assert met(a_run(pages=pages))
    assert met(a_run(pages=pages, **change)) is (of_fp32_alone and pages == "bf16, bf16")


def test_one_rank_has_no_replicated_group_and_misses_nothing_by_it() -> None:
    assert met(a_run(same_bits_as_replicated=None))
    (row,) = rows_of(a_run(same_bits_as_replicated=None))
    assert (row["compared_with_replicated"], row["same_bits_as_replicated"]) == (0, 0)


def test_a_row_has_the_worst_of_its_runs_and_near_ties_stand_apart() -> None:
    tie = a_run(least_routing_margin=1e-7, relative_error=0.4)
    (row, other) = rows_of(a_run(), a_run(relative_error=2e-6), tie, a_run(cp_size=4))
    assert (row["runs"], row["near_ties"], row["relative_error"]) == (2, 1, 2e-6)
    assert (row["rows"], row["compared_with_replicated"], row["met"]) == (20, 3, True)
    assert (other["cp_size"], other["runs"]) == (4, 1)


def test_a_near_tie_is_no_excuse_for_other_bits() -> None:
    tie = a_run(least_routing_margin=1e-7, same_bits_as_replicated=False)
    (row,) = rows_of(a_run(), tie)
    assert (row["same_bits_as_replicated"], row["met"]) == (1, False)

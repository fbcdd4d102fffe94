"""What the oracle's runs amount to: which of them are judged, and a row for each setting.

A random model may have two experts, or two positions of an index score, so nearly tied for some row
that the rounding of fp32 decides which one wins, and the row comes out different as a whole.
transformers' own margins tell. Such runs are counted as near ties, apart from the others. They
still have to give the bits of the same ranks that store every page.
"""

from __future__ import annotations

from typing import Any

from cp_shared_kv.testing.routing_margin import SURE_ROUTING_MARGIN

RELATIVE_ERROR_BOUND = 2e-6
EXACT_PAGES = "fp32, fp32"
SETTINGS = ("model", "pages", "cp_size", "split")
_WORST = ("relative_error", "worst_row_error", "one_rank_error")
_SUMS = (
    *("rows", "greedy_agreeing", "greedy_as_one_rank"),
    *("sparse_rows", "rows_agreeing"),
    *("sure_rows", "sure_rows_agreeing"),
)


def is_decided(run: dict[str, Any]) -> bool:
    """Did no near tie decide this run? With rounded pages every run counts: what is judged there,
    a tie between one rank and several, would be a finding."""
    if run["pages"] != EXACT_PAGES:
        return True
    exchanged = run["sparse_rows"] - run["rows_agreeing"]
    surely_exchanged = run["sure_rows"] - run["sure_rows_agreeing"]
    only_ties = exchanged > 0 and surely_exchanged == 0
    return run["least_routing_margin"] > SURE_ROUTING_MARGIN and not only_ties


def met(run: dict[str, Any]) -> bool:
    """The same bits as the replicated group and one rank's greedy tokens; with fp32 pages also near
    enough to transformers."""
    alike = has_same_bits(run) and run["greedy_as_one_rank"] == run["rows"]
    if run["pages"] != EXACT_PAGES:
        return alike
    return (
        alike
        and run["relative_error"] <= RELATIVE_ERROR_BOUND
        and run["sure_rows_agreeing"] == run["sure_rows"]
        and run["greedy_agreeing"] == run["rows"]
    )


def has_same_bits(run: dict[str, Any]) -> bool:
    """Did it not differ from the replicated group, if there was one?"""
    return run["same_bits_as_replicated"] is not False


def table(agreement: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each model, format, number of ranks and split: the worst of its runs, and sums."""
    by_settings: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in agreement:
        by_settings.setdefault(tuple(run[name] for name in SETTINGS), []).append(run)
    return [
        dict(zip(SETTINGS, settings, strict=True)) | _summary(runs)
        for settings, runs in by_settings.items()
    ]


def _summary(every: list[dict[str, Any]]) -> dict[str, Any]:
    runs = [run for run in every if is_decided(run)]
    compared = [run for run in every if run["same_bits_as_replicated"] is not None]
    return {
        "runs": len(runs),
        "near_ties": len(every) - len(runs),
        **{name: max((run[name] for run in runs), default=None) for name in _WORST},
        **{name: sum(run[name] for run in runs) for name in _SUMS},
        # A near tie is no excuse for other bits.
        "compared_with_replicated": len(compared),
        "same_bits_as_replicated": sum(run["same_bits_as_replicated"] for run in compared),
        "met": all(run["met"] for run in runs) and all(map(has_same_bits, every)),
    }

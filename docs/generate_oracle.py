"""Writes docs/oracle.md from the newest result of the benchmark `oracle`.

Reads that one file only, so it needs nothing installed. `--check` writes nothing, and exits with 1
where the page is not what would be written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/oracle.md"
EXACT = "fp32, fp32"
Row = dict[str, Any]

TEXT = """\
# The models against transformers, and shared pages against all else

Written by `docs/generate_oracle.py` from [its result](../{file}) (transformers {transformers}).
To measure again: `python -m benchmarks oracle`, then `python docs/generate_oracle.py`.

Tiny models with random weights compute in fp32, {seeds} seeds of each, in {cases} cases: at once,
in chunks that end inside pages, behind a shared prefix (at once and in chunks), token by token, and
several requests a batch. Of up to {tokens} tokens the indexer selects {index_topk}. `list` and
`frequency` are two ways to say which layers share a selection, `block fp8` are checkpoints of that
kind, and `wide` models have the widths that fp8 pages need. An error is the norm of the difference
of all logits over the norm of the logits; a cell shows the worst run's.

## fp32 pages against transformers

At most {bound:.0e} is allowed. {exact_verdict}

{exact_table}

A near tie is a run in which two experts, or two positions of an index score, come so close that the
rounding of fp32 decides between them, by transformers' own figures. Those runs are left out here.

## Every page format against one rank

How far the ranks are from one rank with the same format. A value is rounded alike everywhere, but
sums in another order may bring it to the other side of a rounding step. Who owns a page has no part
in that: for the last column the same ranks ran again with every page stored on every rank, and all
logits were compared as bits. {format_verdict}

{format_table}

transformers has no such roundings, so the column that compares with it is a figure and no verdict:
where positions are nearly tied, rounded index keys select others. These models are tamed for it
(what a layer adds is scaled by {branch_scale}); else such selections would drown all that follows.
In percent: rows whose likeliest token is transformers'.
"""


def newest_result(results: Path) -> Path:
    """Their names end with the time of the run."""
    return max(results.glob("oracle-*.json"))


def page(result: Path) -> str:
    """The text of the page."""
    config = json.loads(result.read_text(encoding="utf-8"))["config"]
    rows: list[Row] = config["table"]
    groups = list(dict.fromkeys((row["cp_size"], row["split"]) for row in rows))
    exact = [row for row in rows if row["pages"] == EXACT]
    compared = [row for row in rows if row["compared_with_replicated"]]
    formats = {(row["model"], row["pages"]) for row in compared}
    runs: list[Row] = config["agreement"]
    return TEXT.format(
        file=result.relative_to(ROOT),
        transformers=config["transformers"],
        seeds=len(config["seeds"]),
        cases=len({run["case"] for run in runs}),
        tokens=config["longest_request_tokens"],
        index_topk=config["shapes"]["deepseek_v32"]["index_topk"],
        branch_scale=config["shapes"]["deepseek_v32, wide"]["branch_scale"],
        bound=config["relative_error_bound"],
        exact_verdict=verdict(
            exact,
            "Met by all, with transformers' likeliest token in every row\nand its selection in "
            "every row that is sure of it.",
        ),
        exact_table="\n".join(exact_lines(exact, groups)),
        format_verdict=verdict(
            compared, "All are equal, and so is the likeliest token of every row."
        ),
        format_table="\n".join(
            format_lines([row for row in rows if (row["model"], row["pages"]) in formats], groups)
        ),
    )


def verdict(rows: Sequence[Row], all_met: str) -> str:
    """What can be said of these rows together."""
    missed = [row for row in rows if not row["met"]]
    names = "; ".join(f"{r['model']} ({r['pages']}), {group_name(*key(r))}" for r in missed)
    return f"**Missed by** {names}." if missed else all_met


def exact_lines(rows: Sequence[Row], groups: Sequence[tuple[int, str]]) -> Iterable[str]:
    """A line for each model, a column for each group."""
    yield from heading(["model", *(group_name(*group) for group in groups), "runs", "near ties"])
    for (model,), by_group in grouped(rows, "model"):
        runs, ties = (sum(row[name] for row in by_group.values()) for name in ("runs", "near_ties"))
        errors = [f"{by_group[group]['relative_error']:.1e}" for group in groups]
        yield line([model, *errors, str(runs), str(ties)])


def format_lines(rows: Sequence[Row], groups: Sequence[tuple[int, str]]) -> Iterable[str]:
    """A line for each model and format."""
    one, *several = groups
    names = [group_name(*group) for group in several]
    yield from heading(
        [
            "model",
            "latent, index K",
            "N = 1 from transformers",
            *names,
            "likeliest token",
            "same bits",
        ]
    )
    for (model, pages), by_group in grouped(rows, "model", "pages"):
        alone, others = by_group[one], [by_group[group] for group in several]
        agreeing = 100 * alone["greedy_agreeing"] / alone["rows"]
        yield line(
            [
                model,
                pages,
                f"{alone['relative_error']:.1e} ({agreeing:.1f} %)",
                *(f"{row['one_rank_error']:.1e}" for row in others),
                of_all(others, "greedy_as_one_rank", "rows") + " rows",
                of_all(others, "same_bits_as_replicated", "compared_with_replicated") + " runs",
            ]
        )


def grouped(
    rows: Sequence[Row], *names: str
) -> Iterable[tuple[tuple[str, ...], dict[tuple[int, str], Row]]]:
    """The rows by these fields' values, and below them by group."""
    found: dict[tuple[str, ...], dict[tuple[int, str], Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), {})[key(row)] = row
    return found.items()


def key(row: Row) -> tuple[int, str]:
    return row["cp_size"], row["split"]


def group_name(cp_size: int, split: str) -> str:
    return "N = 1" if cp_size == 1 else f"N = {cp_size}, {split.removesuffix('-split')}"


def of_all(rows: Sequence[Row], part: str, whole: str) -> str:
    return f"{sum(row[part] for row in rows):,} of {sum(row[whole] for row in rows):,}"


def heading(cells: Sequence[str]) -> Iterable[str]:
    return [line(cells), line(["---"] * len(cells))]


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> int:
    wanted = page(newest_result(ROOT / "benchmarks/results"))
    if "--check" not in arguments:
        PAGE.write_text(wanted, encoding="utf-8")
        return 0
    fresh = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == wanted
    if not fresh:
        print("docs/oracle.md is stale; to mend it: python docs/generate_oracle.py")
    return 0 if fresh else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Results of a sweep: tables for the terminal, one JSON for everything else."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cp_shared_kv.errors import ConfigError, CpkvError
from cp_shared_kv.planner.provenance import provenance
from cp_shared_kv.planner.sweep import Sweep
from cp_shared_kv.planner.trace import NO_BLOCKS, Trace
from cp_shared_kv.planner.whole_cells import print_whole, short_count

Row = dict[str, Any]
"""One case, as `CaseResult.as_plain` gives it."""


def all_results(sweep: Sweep, trace: Trace, rows: Sequence[Row]) -> dict[str, Any]:
    """All of a sweep, with what it takes to run it again."""
    return {
        "simulation": trace.name,
        **provenance(),
        "trace": {
            "format": trace.format,
            "conversations": trace.conversations,
            "requests": trace.requests,
            "block_tokens": trace.block_tokens,
        },
        "settings": sweep.as_plain(),
        "notes": notes(sweep, trace),
        "cases": list(rows),
    }


def check_results_place(path: Path, sources: Sequence[Path] = ()) -> None:
    """Raise what `write_results` would, before there is anything to write; what is there stays.

    ConfigError for one of the `sources` that the results come from.
    """
    with writing("--results", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() or path.is_dir():
            path.open("ab").close()
        elif not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
        else:  # a pipe that nobody reads would be waited for
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
    for source in sources:
        if path.exists() and source.exists() and path.samefile(source):
            raise ConfigError(
                "--results",
                value=path,
                allowed="another file than those it is made from",
                change="name a new file: results replace what is there",
            )


def write_results(content: dict[str, Any], path: Path) -> None:
    """Write the JSON; CpkvError when that cannot be done."""
    with writing("--results", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


@contextmanager
def writing(flag: str, path: Path) -> Generator[None]:
    """CpkvError, with the flag and the path, where what is done within cannot be written."""
    try:
        yield
    except OSError as error:
        raise CpkvError(f"{flag} cannot be written", value=f"{path} ({error.strerror})") from error


def assumptions(sweep: Sweep, trace: Trace, model: str, gpu: str) -> str:
    """What the figures rest on, in a sentence or two."""
    answers = "answers take as long as recorded"
    if sweep.answers == "modelled":
        answers = f"decode takes {sweep.decode_seconds_per_token * 1000:g} ms a token"
    groups = "" if sweep.groups == 1 else f"{sweep.groups} groups of "
    said = (
        f"{trace.name}, {sweep.requests:,} requests. Assumed: {model} on {groups}{sweep.cp_size} "
        f"{gpu}, {sweep.physical_tokens:,} tokens a rank (1x); {answers}; rates: "
        f"{sweep.rates.source}."
    )
    return " ".join([said, *notes(sweep, trace)])


def notes(sweep: Sweep, trace: Trace) -> list[str]:
    """What to know of the trace before its hit rates are believed."""
    found = [] if trace.has_blocks else [NO_BLOCKS]
    # Conversations with blocks of their own are new whenever they are dealt again.
    if sweep.users is not None and not trace.local_blocks and sweep.requests > trace.requests:
        times = -(-sweep.requests // trace.requests)
        found.append(
            f"Each of the file's {trace.requests:,} requests is replayed up to {times:,} times; "
            "what a second pass finds of the first counts as found."
        )
    return found


def print_results(rows: Sequence[Row], said: str, console: Console) -> None:
    """What they rest on; cache and work, latencies, balance, descriptors where counted."""
    console.print(said, markup=False)
    print_whole(_cache_table(rows), console)
    print_whole(_latency_table(rows), console)
    print_whole(_short_table(rows), console)
    print_whole(_balance_table(rows), console)
    if any(row["descriptors"] for row in rows):
        print_whole(_descriptor_table(rows), console)


def _cache_table(rows: Sequence[Row]) -> Table:
    return _table(
        "cache and work",
        rows,
        {
            "hit rate": lambda row: f"{row['hit_rate']:.1%}",
            "refused": lambda row: f"{row['refused_requests']:,}",
            "computed": lambda row: short_count(row["computed_tokens"]),
            "saved": lambda row: short_count(row["saved_tokens"]),
            "evicted pages": lambda row: f"{row['evicted_pages']:,}",
            "prefill busy": lambda row: f"{row['prefill_busy']:.0%}",
        },
    )


def _latency_table(rows: Sequence[Row]) -> Table:
    columns: dict[str, Callable[[Row], str]] = {}
    for what, name in (("queue", "queue_seconds"), ("first token", "first_token_seconds")):
        for quantile in ("p50", "p90", "p99"):
            columns[f"{what} {quantile}"] = lambda row, name=name, quantile=quantile: _seconds(
                row[name], quantile
            )
    return _table("seconds until pages are drawn, and to first token", rows, columns)


def _short_table(rows: Sequence[Row]) -> Table:
    """Those that need one chunk at most: what they wait beyond their own work is for others."""
    columns: dict[str, Callable[[Row], str]] = {
        "requests": lambda row: f"{row['short_requests']:,}"
    }
    for quantile in ("p50", "p90", "p99"):
        columns[f"first token {quantile}"] = lambda row, quantile=quantile: _seconds(
            row["short_first_token_seconds"], quantile
        )
    return _table("of these, requests with one chunk or less to compute", rows, columns)


def _balance_table(rows: Sequence[Row]) -> Table:
    def cell(name: str, quantile: str) -> Callable[[Row], str]:
        return lambda row: f"{row[name][quantile]:.3f}" if row[name] else ""

    columns = {
        f"{what} {quantile}": cell(name, quantile)
        for what, name in (
            ("busiest", "busiest_owner_over_ideal"),
            ("least possible", "least_possible_busiest_owner"),
        )
        for quantile in ("p50", "p99")
    }
    return _table("pages of a request's busiest owner over an even share", rows, columns)


def _descriptor_table(rows: Sequence[Row]) -> Table:
    def cell(of: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda row: of(row["descriptors"]) if row["descriptors"] else ""

    columns = {
        "pages p50": cell(lambda found: f"{found['pages']['p50']:,.0f}"),
        "plain p50": cell(lambda found: f"{found['plain']['p50']:,.0f}"),
        "striped p50": cell(lambda found: f"{found['striped']['p50']:,.0f}"),
        "plain p99": cell(lambda found: f"{found['plain']['p99']:,.0f}"),
        "striped p99": cell(lambda found: f"{found['striped']['p99']:,.0f}"),
        "fewer, in all": cell(
            lambda found: f"{found['plain_total'] / found['striped_total']:.1f}x"
        ),
    }
    return _table("descriptors of a transfer, for one layer and kind of page", rows, columns)


def _table(title: str, rows: Sequence[Row], columns: dict[str, Callable[[Row], str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("pool", "users", *columns):
        table.add_column(heading, justify="right")
    for row in rows:
        users = "-" if row["users"] is None else f"{row['users']:,}"
        table.add_row(f"{row['multiplier']}x", users, *(cell(row) for cell in columns.values()))
    return table


def _seconds(quantiles: dict[str, float] | None, name: str) -> str:
    return "" if quantiles is None else f"{quantiles[name]:,.2f}"

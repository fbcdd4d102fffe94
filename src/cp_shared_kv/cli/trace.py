"""`cpkv trace`: a workload of one's own, looked at before it is simulated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cp_shared_kv.cli.whole_numbers import PARAMETERS, WholeNumbers
from cp_shared_kv.planner.ranges import check_at_least
from cp_shared_kv.planner.trace import NO_BLOCKS
from cp_shared_kv.planner.trace_files import read_trace
from cp_shared_kv.planner.trace_files import validate as validate_file
from cp_shared_kv.planner.trace_summary import Quantiles, TraceSummary
from cp_shared_kv.planner.trace_summary import summarise as summarise_trace
from cp_shared_kv.planner.whole_cells import print_whole, short_count

EXIT_WRONG = 1
MOST_ERRORS = 20
DEFAULT_LENGTHS = (131_072, 262_144, 524_288)

app = App(
    name="trace",
    help="Recorded workloads: check a file, and say what is in it.",
    group_parameters=PARAMETERS,
)


@app.command
def validate(file: Path, /, *, most_errors: int = MOST_ERRORS) -> int:
    """Read a trace to its end and say what is wrong with it, line by line.

    Agentic conversations and Mooncake's requests (JSON lines), or a CSV with arrival_seconds,
    prompt_tokens and output_tokens. Ends with 0 where `cpkv simulate` would take the file, else
    with 1.

    ```
    cpkv trace validate mine.jsonl
    ```

    Parameters
    ----------
    file
        The trace. Its format is told by its first line.
    most_errors
        Say no more than so many; the others are only counted.
    """
    check_at_least("--most-errors", most_errors, 1)
    found = validate_file(file, most_errors)
    for error in found.errors:
        print(error)
    if found.trace is not None:
        requests = f"{found.trace.requests:,} requests"
        print(f"{file.name}: {found.trace.format} trace of {requests}, nothing wrong")
        if not found.trace.has_blocks:
            print(NO_BLOCKS)
        return 0
    if found.wrong_lines > len(found.errors):
        print(f"... and {found.wrong_lines - len(found.errors):,} more")
    return EXIT_WRONG


@app.command
def summarise(
    file: Path,
    /,
    *,
    lengths: WholeNumbers = DEFAULT_LENGTHS,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Say what a trace asks for, and how much of it a cache without limit would find.

    The last figure bounds the hit rate of every pool where `cpkv simulate` replays each request
    of the file once. Prompts longer than a pool's logical tokens are refused by it.

    ```
    cpkv trace summarise mine.jsonl --lengths 237312,1898496
    ```

    Parameters
    ----------
    file
        The trace. Its format is told by its first line.
    lengths
        Count the prompts longer than these, some numbers with commas between.
    as_json
        Write the summary as JSON to stdout.
    """
    trace = read_trace(file)
    found = summarise_trace(trace, tuple(lengths))
    if as_json:
        print(json.dumps(found.as_plain(), indent=1))
        return 0
    console = Console(highlight=False)
    print_whole(_facts(found), console)
    print_whole(_distributions(found), console)
    if not trace.has_blocks:
        console.print(f"  {NO_BLOCKS}", markup=False)
    return 0


def _facts(found: TraceSummary) -> Table:
    table = Table(title=found.name, title_justify="left", box=SIMPLE_HEAD, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("format", f"{found.format}, blocks of {found.block_tokens} tokens")
    if found.conversations is not None:
        table.add_row("conversations", f"{found.conversations:,}")
    table.add_row("requests", f"{found.requests:,}")
    if found.span_seconds is not None:
        table.add_row("from first to last", f"{found.span_seconds:,.0f} s")
    table.add_row("prompt tokens", short_count(found.prompt_tokens_total))
    table.add_row("distinct blocks", f"{found.distinct_blocks:,}")
    table.add_row("found by a cache without limit", f"{found.reusable_fraction:.1%}")
    for length, count in found.longer_prompts.items():
        part = f"{count:,} ({count / found.requests:.1%})"
        table.add_row(f"prompts longer than {length:,}", part)
    return table


def _distributions(found: TraceSummary) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("of a request")
    for name in found.prompt_tokens:
        table.add_column(name, justify="right")
    _add(table, "prompt tokens", found.prompt_tokens)
    _add(table, "output tokens", found.output_tokens)
    _add(table, "answer, s", found.answer_seconds)
    _add(table, "thinking before it, s", found.think_seconds)
    _add(table, "its conversation, requests", found.requests_per_conversation)
    return table


def _add(table: Table, what: str, values: Quantiles | None) -> None:
    if values is not None:
        table.add_row(what, *(f"{value:,.0f}" for value in values.values()))

"""CSV traces with arrival times and lengths only: nothing is ever found in the cache.

The columns are found by their names in the first line, those of the Azure and BurstGPT traces among
them. Times are seconds, or dates such as 2023-11-16 18:15:46.68.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from cp_shared_kv.errors import TraceError
from cp_shared_kv.planner.trace import Refuse, Request, Trace, TraceBuilder, stop_at_first

BLOCK_TOKENS = 64
Row = Mapping[str, str | None]

_NAMES = {
    "arrival": ("arrival_seconds", "timestamp"),
    "prompt": ("prompt_tokens", "contexttokens", "request tokens", "input_length"),
    "output": ("output_tokens", "generatedtokens", "response tokens", "output_length"),
}


def read_lengths(path: Path, refuse: Refuse = stop_at_first) -> Trace:
    """Requests of given lengths at given times. `refuse` gets a TraceError for each wrong line."""
    builder, first_id = TraceBuilder(), 0
    start: float | None = None
    before = -math.inf
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        with _lines_are_csv(path, rows):
            columns = _columns(path, rows.fieldnames)
        for row in _rows(path, rows):
            where = f"{path.name}, line {rows.line_num}"
            try:
                at, prompt, output = _request(where, columns, row, before)
            except TraceError as error:
                refuse(error)
                continue
            before = at
            start = at if start is None else start
            blocks = -(-prompt // BLOCK_TOKENS)
            builder.begin_conversation()
            builder.add(Request(at - start, prompt, output, [(first_id, blocks)]))
            first_id += blocks  # no block is met twice
    return builder.build(path, "lengths", block_tokens=BLOCK_TOKENS)


def has_known_column(line: str) -> bool:
    """Whether a CSV's first line names any column of such a trace."""
    names = {name.strip().strip('"').lower() for name in line.split(",")}
    return any(names & set(known) for known in _NAMES.values())


def _rows(path: Path, rows: csv.DictReader[str]) -> Iterator[Row]:
    with _lines_are_csv(path, rows):
        yield from rows


@contextmanager
def _lines_are_csv(path: Path, rows: csv.DictReader[str]) -> Generator[None]:
    try:
        yield
    except csv.Error as error:  # nothing behind such a line can be told apart
        # The reader's own count: that of `rows` has not come to this line.
        raise TraceError(f"{path.name}, line {rows.reader.line_num}", value=error) from error


def _request(
    where: str, columns: Mapping[str, str], row: Row, before_seconds: float
) -> tuple[float, int, int]:
    """Seconds, prompt tokens and output tokens of a row."""
    at = _seconds(where, columns["arrival"], row)
    if at < before_seconds:
        raise TraceError(
            f"{where}: {columns['arrival']} goes back",
            value=row[columns["arrival"]],
            change="sort the file by it",
        )
    prompt = _tokens(where, columns["prompt"], row, least=1)
    return at, prompt, _tokens(where, columns["output"], row, least=0)


def _columns(path: Path, header: object) -> dict[str, str]:
    names = [str(name) for name in header] if isinstance(header, list | tuple) else []
    found: dict[str, str] = {}
    for what, known in _NAMES.items():
        column = next((name for name in names if name.strip().lower() in known), None)
        if column is None:
            raise TraceError(
                f"{path.name}, line 1: no column for {what}",
                value=", ".join(names[:8]) or "an empty line",
                allowed=f"one of {', '.join(known)}",
                change="name the columns arrival_seconds,prompt_tokens,output_tokens",
            )
        found[what] = column
    return found


def _seconds(where: str, column: str, row: Row) -> float:
    text = (row[column] or "").strip()
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = datetime.fromisoformat(text).timestamp()
        except ValueError:
            seconds = math.nan
    if not math.isfinite(seconds):
        raise TraceError(f"{where}: {column}", value=repr(text), allowed="seconds, or a date")
    return seconds


def _tokens(where: str, column: str, row: Row, *, least: int) -> int:
    text = (row[column] or "").strip()
    if not text.isascii() or not text.isdecimal() or not least <= int(text) < 2**31:
        raise TraceError(
            f"{where}: {column}",
            value=repr(text),
            allowed=f"a whole number of {least} or more, below {2**31}",
        )
    return int(text)

"""Opens a trace of any known format, told by its first line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cp_shared_kv.errors import TraceError
from cp_shared_kv.planner.trace import Refuse, Trace, stop_at_first
from cp_shared_kv.planner.trace_csv import read_lengths
from cp_shared_kv.planner.trace_json import read_agentic, read_mooncake

_FIRST_BYTES = 1 << 16


def read_trace(path: Path, refuse: Refuse = stop_at_first) -> Trace:
    """The trace in a file. TraceError, with the line, for anything that is none."""
    try:
        first = _first_line(path)
        if not first.startswith(b"{"):
            return read_lengths(path, refuse)
        return read_agentic(path, refuse) if b'"reqs"' in first else read_mooncake(path, refuse)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError("the trace cannot be read", value=f"{path} ({error})") from error


@dataclass(frozen=True, slots=True)
class Validation:
    """What reading a file to its end has found. `errors` are the first of all that there are."""

    trace: Trace | None
    """None where anything is wrong."""
    errors: tuple[TraceError, ...]
    wrong_lines: int


def validate(path: Path, most_errors: int) -> Validation:
    """Read a file to its end and keep the first `most_errors` things that are wrong with it."""
    errors: list[TraceError] = []
    wrong = 0

    def note(error: TraceError) -> None:
        nonlocal wrong
        wrong += 1
        if len(errors) < most_errors:
            errors.append(error)

    try:
        trace = read_trace(path, note)
    except TraceError as error:
        # A file of wrong lines alone has no request either, which then need not be said.
        if not wrong or error.__cause__ is not None:
            note(error)
        trace = None
    return Validation(None if wrong else trace, tuple(errors), wrong)


def _first_line(path: Path) -> bytes:
    """Its beginning, without blanks; empty where all lines are."""
    with path.open("rb") as file:
        while line := file.readline(_FIRST_BYTES):
            if line.strip():
                return line.lstrip()
    return b""

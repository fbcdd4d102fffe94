"""Opens a trace of any known format, told by its first line."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cp_shared_kv.errors import TraceError
from cp_shared_kv.planner.trace import Refuse, Trace, stop_at_first
from cp_shared_kv.planner.trace_csv import has_known_column, read_lengths
from cp_shared_kv.planner.trace_json import MooncakeLine, read_agentic, read_mooncake

_FIRST_BYTES = 1 << 16
_SHOWN_BYTES = 40


def read_trace(path: Path, refuse: Refuse = stop_at_first) -> Trace:
    """The trace in a file. TraceError, with the line, for anything that is none."""
    _check_regular(path)
    try:
        first = _first_line(path)
        if not _looks_like_a_trace(first):
            raise _no_trace(path, first)
        if not first.startswith(b"{"):
            return read_lengths(path, refuse)
        return read_agentic(path, refuse) if b'"reqs"' in first else read_mooncake(path, refuse)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise TraceError("the trace cannot be read", value=f"{path} ({why})") from error


@dataclass(frozen=True, slots=True)
class Validation:
    """What reading a file to its end has found. `errors` are the first of all that there are."""

    trace: Trace | None
    """None where anything is wrong."""
    errors: tuple[TraceError, ...]
    wrong_lines: int


def validate(path: Path, most_errors: int) -> Validation:
    """Read a file to its end and keep the first `most_errors` things that are wrong with it.

    TraceError for what is no file, and for a file that the system does not let us read.
    """
    _check_regular(path)
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
        if isinstance(error.__cause__, OSError):
            raise
        # A file of wrong lines alone has no request either, which then need not be said.
        if not wrong or error.__cause__ is not None:
            note(error)
        trace = None
    return Validation(None if wrong else trace, tuple(errors), wrong)


def _check_regular(path: Path) -> None:
    """A pipe has no beginning to tell the format by and then to read again; a device has no end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise TraceError(
            "the trace is no regular file", value=path, change="write it to a file first"
        )


def _looks_like_a_trace(first: bytes) -> bool:
    """Whether a first line has anything of a format that is known, right or wrong."""
    if not first.startswith(b"{"):
        return has_known_column(first.decode("utf-8-sig"))
    # What cannot be decoded is a line that is wrong, of a trace that may be right.
    with suppress(msgspec.DecodeError, RecursionError):
        return bool(msgspec.json.decode(first).keys() & {"reqs", *MooncakeLine.__struct_fields__})
    return True


def _no_trace(path: Path, first: bytes) -> TraceError:
    shown = first[:_SHOWN_BYTES].decode(errors="replace").strip()
    return TraceError(
        f"{path.name} is no trace of a known format",
        value=f"its first line is {shown!r}" if first else "it is empty",
        allowed="agentic conversations or Mooncake's requests, a JSON object a line; or a CSV with "
        "arrival_seconds, prompt_tokens and output_tokens",
        change="see docs/planning.md for a line of each",
    )


def _first_line(path: Path) -> bytes:
    """Its beginning, without blanks; empty where all lines are."""
    with path.open("rb") as file:
        while line := file.readline(_FIRST_BYTES):
            if line.strip():
                return line.lstrip()
    return b""

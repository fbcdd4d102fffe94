"""Opens a trace of any known format, told by its first line."""

from __future__ import annotations

from pathlib import Path

from cp_shared_kv.errors import TraceError
from cp_shared_kv.planner.trace import Trace
from cp_shared_kv.planner.trace_csv import read_lengths
from cp_shared_kv.planner.trace_json import read_agentic, read_mooncake

_FIRST_BYTES = 1 << 16


def read_trace(path: Path) -> Trace:
    """The trace in a file. TraceError, with the line, for anything that is none."""
    try:
        with path.open("rb") as file:
            first = file.readline(_FIRST_BYTES)
        if not first.lstrip().startswith(b"{"):
            return read_lengths(path)
        return read_agentic(path) if b'"reqs"' in first else read_mooncake(path)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError("the trace cannot be read", value=f"{path} ({error})") from error

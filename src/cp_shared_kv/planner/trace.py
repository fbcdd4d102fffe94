"""A recorded workload: conversations of requests, in columns, so that millions fit in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import TraceError

TraceFormat = Literal["agentic", "mooncake", "lengths"]
Int64s = npt.NDArray[np.int64]
Float64s = npt.NDArray[np.float64]
Refuse = Callable[[TraceError], None]
"""What a reader does with a line that is wrong; where it returns, the line is left out."""


NO_BLOCKS = (
    "This format has no block ids, so nothing can be found in a cache: hit rates of 0 say nothing "
    "about the workload."
)
"""To say where figures of a trace without blocks are shown."""


def stop_at_first(error: TraceError) -> None:
    """The way to refuse a line where the trace is needed whole."""
    raise error


class Request(NamedTuple):
    """One recorded request as a reader hands it on. Times in seconds."""

    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    block_runs: Iterable[tuple[int, int]]
    """(first block id, blocks), in the order of the prompt."""
    answer_seconds: float | None = None
    think_seconds: float = 0.0
    """Between the answer before and this request."""


@dataclass(frozen=True, eq=False)
class Trace:
    """All requests of a file by conversation, one row each.

    `block_tokens` is the length of a block; equal block ids at equal places mean equal tokens,
    within a conversation where `local_blocks`, else everywhere. `absolute_times` says that
    `at_seconds` counts from the start of the trace and not of the conversation.
    """

    name: str
    format: TraceFormat
    block_tokens: int
    local_blocks: bool
    absolute_times: bool
    conversation_start: Int64s
    """i64[conversations + 1]: the first row of each, and the number of rows."""
    at_seconds: Float64s
    prompt_tokens: Int64s
    output_tokens: Int64s
    answer_seconds: Float64s
    """NaN where the trace has none."""
    think_seconds: Float64s
    run_start: Int64s
    """i64[rows + 1]: where each row's runs begin in `runs`."""
    runs: Int64s
    """i64[runs, 2]: (first block id, blocks)."""

    @property
    def conversations(self) -> int:
        """How many there are; a trace without conversations has one for each request."""
        return len(self.conversation_start) - 1

    @property
    def requests(self) -> int:
        """Rows in all."""
        return len(self.prompt_tokens)

    @property
    def has_blocks(self) -> bool:
        """Whether the file says which prompts begin alike; without, nothing is ever cached."""
        return self.format != "lengths"

    @property
    def has_answer_times(self) -> bool:
        """Whether any answer's time was recorded."""
        return bool(np.isfinite(self.answer_seconds).any())

    def rows(self, conversation: int) -> range:
        """The rows of one conversation, in order."""
        start, stop = self.conversation_start[conversation : conversation + 2].tolist()
        return range(start, stop)


class TraceBuilder:
    """Collects rows. The caller has checked each; ids and lengths are at least 0."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._rows: list[tuple[float, int, int, float, float]] = []
        self._run_starts: list[int] = [0]
        self._runs: list[tuple[int, int]] = []

    def begin_conversation(self) -> None:
        """The rows that follow belong to the next conversation."""
        self._starts.append(len(self._rows))

    def add(self, request: Request) -> None:
        """The next request of the conversation."""
        answer = float("nan") if request.answer_seconds is None else request.answer_seconds
        self._rows.append(
            (
                request.at_seconds,
                request.prompt_tokens,
                request.output_tokens,
                answer,
                request.think_seconds,
            )
        )
        self._runs.extend(request.block_runs)
        self._run_starts.append(len(self._runs))

    def build(
        self,
        path: Path,
        trace_format: TraceFormat,
        *,
        block_tokens: int,
        local_blocks: bool = False,
        absolute_times: bool = True,
    ) -> Trace:
        """The trace. TraceError when there is no request at all."""
        if not self._rows:
            raise TraceError("the trace has no request", value=path)
        columns = list(zip(*self._rows, strict=True))
        return Trace(
            name=path.name,
            format=trace_format,
            block_tokens=block_tokens,
            local_blocks=local_blocks,
            absolute_times=absolute_times,
            conversation_start=np.array([*self._starts, len(self._rows)], np.int64),
            at_seconds=np.array(columns[0], np.float64),
            prompt_tokens=np.array(columns[1], np.int64),
            output_tokens=np.array(columns[2], np.int64),
            answer_seconds=np.array(columns[3], np.float64),
            think_seconds=np.array(columns[4], np.float64),
            run_start=np.array(self._run_starts, np.int64),
            runs=np.array(self._runs, np.int64).reshape(-1, 2),
        )

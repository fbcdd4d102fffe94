"""A trace in a few numbers: what it asks for, and how much of it a cache could ever find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.prefix_cache import PrefixCache, key_rows
from cp_shared_kv.planner.outcome import quantiles
from cp_shared_kv.planner.trace import Float64s, Trace
from cp_shared_kv.planner.trace_keys import TraceKeys

Quantiles = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """Quantiles are over requests. None is what the trace does not have."""

    name: str
    format: str
    block_tokens: int
    conversations: int | None
    requests: int
    prompt_tokens_total: int
    prompt_tokens: Quantiles
    output_tokens: Quantiles
    requests_per_conversation: Quantiles | None
    answer_seconds: Quantiles | None
    think_seconds: Quantiles | None
    span_seconds: float | None
    """From the first request to the last, where times are those of the whole trace."""
    distinct_blocks: int
    reusable_fraction: float
    """Prompt tokens in blocks that an earlier request began with too: no cache finds more."""
    longer_prompts: dict[int, int]
    """By length: how many prompts are longer."""

    def as_plain(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


def summarise(trace: Trace, lengths: Sequence[int]) -> TraceSummary:
    """Count a trace; `lengths` are those for which longer prompts are counted."""
    reused, distinct = _reuse(trace)
    total = int(trace.prompt_tokens.sum())
    several = not trace.absolute_times
    answers = trace.answer_seconds[np.isfinite(trace.answer_seconds)]
    return TraceSummary(
        name=trace.name,
        format=trace.format,
        block_tokens=trace.block_tokens,
        conversations=trace.conversations if several else None,
        requests=trace.requests,
        prompt_tokens_total=total,
        prompt_tokens=_quantiles(trace.prompt_tokens.astype(np.float64)) or {},
        output_tokens=_quantiles(trace.output_tokens.astype(np.float64)) or {},
        requests_per_conversation=_quantiles(np.diff(trace.conversation_start).astype(np.float64))
        if several
        else None,
        answer_seconds=_quantiles(answers),
        think_seconds=_quantiles(trace.think_seconds) if several else None,
        span_seconds=None if several else float(np.ptp(trace.at_seconds)),
        distinct_blocks=distinct,
        reusable_fraction=round(reused / total, 4),
        longer_prompts={
            length: int(np.count_nonzero(trace.prompt_tokens > length)) for length in lengths
        },
    )


def _quantiles(values: Float64s) -> Quantiles | None:
    return quantiles(values.tolist())


def _reuse(trace: Trace) -> tuple[int, int]:
    """Tokens that a cache without limit finds, and the blocks that it then holds."""
    keys, cache = TraceKeys(trace, trace.block_tokens), PrefixCache()
    found = held = 0
    for conversation in range(trace.conversations):
        if trace.local_blocks:
            cache = PrefixCache()  # nothing of another conversation is ever found
        for row in trace.rows(conversation):
            rows = key_rows(keys.page_keys(row, conversation))
            # Nobody asks this cache for pages, so they need no numbers.
            end, known = cache.insert(cache.root, rows, LogicalPages(np.zeros(len(rows), np.int64)))
            cache.unlock(end)
            found, held = found + known, held + len(rows) - known
    return found * trace.block_tokens, held

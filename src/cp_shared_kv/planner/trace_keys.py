"""Prefix-cache keys of recorded requests: from the trace's blocks to the pool's pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.planner.trace import Int64s, Trace

PageKeys = npt.NDArray[np.void]


class TraceKeys:
    """Makes page keys of a trace's rows: equal exactly where the recorded blocks are.

    ConfigError when neither of page and block is a whole number of the other.
    """

    def __init__(self, trace: Trace, page_size: int) -> None:
        block = trace.block_tokens
        if block % page_size and page_size % block:
            raise ConfigError(
                f"--page-size does not go with the blocks of {trace.name}",
                value=page_size,
                allowed=f"divisors and multiples of {block} tokens",
            )
        self._trace, self._page_size = trace, page_size
        self._pages_per_block = block // page_size
        self._blocks_per_page = page_size // block

    def page_keys(self, row: int, instance: int) -> PageKeys:
        """One key for each full page of a row's prompt.

        `instance` numbers the conversations as they are begun: blocks that are a conversation's
        own are not shared with another instance, be it of the same recording.
        """
        blocks = self._blocks(row)
        if self._trace.local_blocks:
            blocks += instance << 32
        full_pages = int(self._trace.prompt_tokens[row]) // self._page_size
        if self._pages_per_block == 1:
            return _keys(blocks[:full_pages])
        if self._pages_per_block > 1:
            parts = blocks[:, None] * self._pages_per_block + np.arange(self._pages_per_block)
            return _keys(parts.reshape(-1)[:full_pages])
        whole = len(blocks) // self._blocks_per_page * self._blocks_per_page
        pages = np.ascontiguousarray(blocks[:whole]).view(f"V{8 * self._blocks_per_page}")
        return pages[:full_pages]

    def _blocks(self, row: int) -> Int64s:
        trace = self._trace
        start, stop = trace.run_start[row : row + 2].tolist()
        first, count = trace.runs[start:stop].T
        # Block i of the prompt is i places behind the first of its run.
        before = np.cumsum(count) - count
        return np.repeat(first - before, count) + np.arange(count.sum())


def _keys(ids: Int64s) -> PageKeys:
    return np.ascontiguousarray(ids).view("V8")

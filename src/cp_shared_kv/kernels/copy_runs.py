"""Copies byte ranges of any lengths out of one buffer into another, which may be a peer's.

The reference is `copy_runs` in transfer/strided_copy.py, which copies the same ranges on a CPU.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 1024
WARPS = 4
PROGRAMS = 4096
"""About so many in all: enough to fill a GPU, however few the ranges are."""


def copy_runs(source: torch.Tensor, runs: torch.Tensor, longest_words: int) -> None:
    """Copy each range to memory that this GPU has mapped, on the current stream.

    source u8[*]: the buffer that ranges are read from. runs i64[3, count], on its device: where
    each begins, in words of 8 bytes from the buffer's first; where it goes, counted likewise, which
    may lie outside the buffer; and its words, at most `longest_words`. All of them even, and the
    targets do not overlap. Nothing of this is checked here.
    """
    count = runs.shape[1]
    if count:
        parts = min(triton.cdiv(longest_words, BLOCK_WORDS), max(1, PROGRAMS // count))
        words = source.view(torch.int64)
        _copy_runs[(count, parts)](words, runs, count, BLOCK_WORDS, num_warps=WARPS)


@triton.jit(do_not_specialize=["count"])
def _copy_runs(words, runs, count, BLOCK: tl.constexpr):
    run = tl.program_id(0)
    # Says what Triton cannot see: ranges begin and end at multiples of 16 bytes.
    begin = tl.multiple_of(tl.load(runs + run), 2)
    target = tl.multiple_of(tl.load(runs + count + run), 2)
    length = tl.multiple_of(tl.load(runs + 2 * count + run), 2)
    step = tl.num_programs(1) * BLOCK
    first = tl.program_id(1) * BLOCK
    for turn in range((length - first + step - 1) // step):
        word = first + turn * step + tl.arange(0, BLOCK).to(tl.int64)
        inside = word < length
        tl.store(words + target + word, tl.load(words + begin + word, mask=inside), mask=inside)

"""Which rows the top-k of this rank's tokens name: each once, in ascending order, on the GPU.

Two launches fill a bitmap and its counts, a third numbers the set bits and lists them, a fourth
turns each index into its row's number. The reference is `torch.unique(..., return_inverse=True)`,
which waits for the device to learn how many there are.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

WORD_BITS = 32
BLOCK_WORDS = 128
INDICES = 1024


@dataclass(frozen=True)
class SelectedRows:
    """The memory of a selection, for as many slots and indices as it was made for.

    Used again by each layer. Its addresses never change, so a CUDA graph may hold them.
    """

    slots: int
    """Slots 0..slots-1 can be selected; what lies above is the chunk, which needs no fetching."""
    bitmap: torch.Tensor
    """i32: a bit for each slot, in whole blocks."""
    block_counts: torch.Tensor
    """i32: set bits in each block of the bitmap."""
    word_starts: torch.Tensor
    """i32: set bits before each word of the bitmap."""
    rows: torch.Tensor
    """i32[capacity]: the selected slots, ascending; only the first `count` mean anything."""
    count: torch.Tensor
    """i32[1]: how many slots are selected."""

    @classmethod
    def make(cls, slots: int, indices: int, device: torch.device) -> Self:
        """For at most so many indices over so many slots."""
        blocks = max(1, triton.cdiv(slots, BLOCK_WORDS * WORD_BITS))

        def empty(length: int) -> torch.Tensor:
            return torch.empty(length, dtype=torch.int32, device=device)

        words = blocks * BLOCK_WORDS
        rows = max(1, min(slots, indices))
        return cls(slots, empty(words), empty(blocks), empty(words), empty(rows), empty(1))

    def select(self, topk: torch.Tensor, compact: torch.Tensor, first_row: int) -> None:
        """Find the rows of topk i32[T, k] (slots; below 0: padding), and number them.

        compact i32[T, k] becomes each index's row: for a slot that is fetched, first_row plus its
        place in `rows`; for one of the chunk, its distance from the chunk's start; -1 for padding.
        """
        indices = topk.numel()
        grid = (max(1, triton.cdiv(indices, INDICES)),)
        blocks = len(self.block_counts)
        self.bitmap.zero_()
        _mark[grid](topk, indices, self.bitmap, self.slots, INDICES)
        _count[(blocks,)](self.bitmap, self.block_counts, BLOCK_WORDS)
        _list[(blocks,)](
            self.bitmap,
            self.block_counts,
            self.word_starts,
            self.rows,
            self.count,
            blocks,
            triton.next_power_of_2(blocks),
            BLOCK_WORDS,
        )
        _number[grid](
            topk, indices, compact, self.bitmap, self.word_starts, self.slots, first_row, INDICES
        )


@triton.jit
def _ones(word):
    """How many bits of a word are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word * 0x01010101 >> 24) & 0xFF


@triton.jit(do_not_specialize=["indices", "slots"])
def _mark(topk, indices, bitmap, slots, INDICES: tl.constexpr):
    item = tl.program_id(0) * INDICES + tl.arange(0, INDICES)
    slot = tl.load(topk + item, mask=item < indices, other=-1)
    tl.atomic_or(
        bitmap + (slot >> 5),
        tl.full((INDICES,), 1, tl.int32) << (slot & 31),
        mask=(slot >= 0) & (slot < slots),
        sem="relaxed",
    )


@triton.jit
def _count(bitmap, block_counts, WORDS: tl.constexpr):
    block = tl.program_id(0)
    words = tl.load(bitmap + block * WORDS + tl.arange(0, WORDS))
    tl.store(block_counts + block, tl.sum(_ones(words)))


@triton.jit(do_not_specialize=["blocks"])
def _list(
    bitmap,
    block_counts,
    word_starts,
    rows,
    count,
    blocks,
    BLOCKS_BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    block = tl.program_id(0)
    earlier = tl.arange(0, BLOCKS_BLOCK)
    start = tl.sum(tl.load(block_counts + earlier, mask=earlier < block, other=0))
    word = block * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bitmap + word)
    ones = _ones(bits)
    word_start = start + tl.cumsum(ones) - ones
    tl.store(word_starts + word, word_start)
    bit = tl.arange(0, 32)[None, :]
    below = bits[:, None] & ((tl.full((1, 32), 1, tl.int32) << bit) - 1)
    is_set = ((bits[:, None] >> bit) & 1) == 1
    tl.store(rows + word_start[:, None] + _ones(below), word[:, None] * 32 + bit, mask=is_set)
    if block == blocks - 1:
        tl.store(count, start + tl.sum(ones))


@triton.jit(do_not_specialize=["indices", "slots", "first_row"])
def _number(topk, indices, compact, bitmap, word_starts, slots, first_row, INDICES: tl.constexpr):
    item = tl.program_id(0) * INDICES + tl.arange(0, INDICES)
    inside = item < indices
    slot = tl.load(topk + item, mask=inside, other=-1)
    fetched = (slot >= 0) & (slot < slots)
    bits = tl.load(bitmap + (slot >> 5), mask=fetched, other=0)
    start = tl.load(word_starts + (slot >> 5), mask=fetched, other=0)
    below = bits & ((tl.full((INDICES,), 1, tl.int32) << (slot & 31)) - 1)
    number = tl.where(fetched, first_row + start + _ones(below), slot - slots)
    tl.store(compact + item, tl.where(slot < 0, -1, number), mask=inside)

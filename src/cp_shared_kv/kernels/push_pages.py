"""Sends whole pages of this rank to the same places in every rank's scratch.

What all ranks read alike, its owner can as well write to all of them. A read over NVLink sends
its request against the other direction's data; a write does not, and is 9 % faster when all ranks
move data at once (docs/gpu/README.md). The reference is the same as for `pull_pages`.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cp_shared_kv.kernels import WORD_BYTES
from cp_shared_kv.kernels.pull_pages import BLOCK_WORDS, WARPS


def push_pages(
    layer_pages: torch.Tensor,
    physical_pages: torch.Tensor,
    scratch: torch.Tensor,
    first_page: int,
    scratch_distances: torch.Tensor,
    cp_rank: int,
) -> None:
    """Copy physical_pages i64[K] to scratch pages first_page.. of every rank.

    Waits for nobody: the caller sees to it that no rank still reads what is overwritten, and that
    all come together before the first one reads.

    layer_pages u8[*, page_bytes]: this rank's pages of the layer. scratch u8[M, page_bytes]: this
    rank's; scratch_distances i64[N]: how many words of 8 bytes after it each rank's begins. All on
    one device; neither lengths nor alignments are checked here.
    """
    page_words = scratch.shape[1] // WORD_BYTES
    if len(physical_pages):
        blocks = triton.cdiv(page_words, BLOCK_WORDS)
        _push_pages[(len(physical_pages) * blocks,)](
            layer_pages.view(torch.int64),
            physical_pages,
            scratch.view(torch.int64),
            first_page,
            scratch_distances,
            page_words,
            BLOCK_WORDS,
            len(scratch_distances),
            cp_rank,
            num_warps=WARPS,
        )


@triton.jit(do_not_specialize=["first_page"])
def _push_pages(
    layer_words,
    physical_pages,
    scratch_words,
    first_page,
    scratch_distances,
    PAGE_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    CP_SIZE: tl.constexpr,
    CP_RANK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (PAGE_WORDS + BLOCK - 1) // BLOCK
    item = tl.program_id(0) // BLOCKS
    word = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = word < PAGE_WORDS
    # Says what Triton cannot see: a page begins at a multiple of 16 bytes, in each scratch.
    source = tl.multiple_of(tl.load(physical_pages + item) * PAGE_WORDS, 2)
    target = tl.multiple_of((first_page + item).to(tl.int64) * PAGE_WORDS, 2)
    words = tl.load(layer_words + source + word, mask=inside)
    # The next rank first, this one last, so that no rank is written to by all the others at once.
    for turn in tl.static_range(CP_SIZE):
        distance = tl.multiple_of(tl.load(scratch_distances + (CP_RANK + 1 + turn) % CP_SIZE), 2)
        tl.store(scratch_words + (target + distance) + word, words, mask=inside)

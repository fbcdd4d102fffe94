"""Brings whole pages from their owners' memory into scratch.

The reference is `torch.index_select` for each owner, as reads/pull.py does it.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# (a kernel's body is a language of its own, which no type checker knows)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cp_shared_kv.kernels import WORD_BYTES

BLOCK_WORDS = 1024
WARPS = 4


def pull_pages(
    layer_pages: torch.Tensor, sources: torch.Tensor, order: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Fill scratch u8[M, page_bytes] from pages that this GPU has mapped, its own or others'.

    layer_pages u8[*, page_bytes]: this rank's pages of the layer. sources i64[M]: how many words
    of 8 bytes after its first byte each page begins. order i32[M]: the pages in the order in
    which they are fetched. All on one device; neither lengths nor alignments are checked here.
    """
    page_words = scratch.shape[1] // WORD_BYTES
    if len(order):
        blocks = triton.cdiv(page_words, BLOCK_WORDS)
        _pull_pages[(len(order) * blocks,)](
            layer_pages.view(torch.int64),
            sources,
            order,
            scratch.view(torch.int64),
            page_words,
            BLOCK_WORDS,
            num_warps=WARPS,
        )


@triton.jit
def _pull_pages(
    layer_words, sources, order, scratch_words, PAGE_WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    BLOCKS: tl.constexpr = (PAGE_WORDS + BLOCK - 1) // BLOCK
    item = tl.program_id(0) // BLOCKS
    word = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(order + item).to(tl.int64)
    # Says what Triton cannot see: a page begins at a multiple of 16 bytes.
    source = tl.multiple_of(tl.load(sources + page), 2)
    target = tl.multiple_of(page * PAGE_WORDS, 2)
    if PAGE_WORDS % BLOCK == 0:
        tl.store(scratch_words + target + word, tl.load(layer_words + source + word))
    else:
        inside = word < PAGE_WORDS
        words = tl.load(layer_words + source + word, mask=inside)
        tl.store(scratch_words + target + word, words, mask=inside)

"""Brings selected rows from their owners' memory into consecutive rows.

The reference is `gather_rows` of the page format on the whole prefix in scratch.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cp_shared_kv.kernels import WORD_BYTES

ROWS = 16
"""Rows that one program brings."""
WARPS = 8


def pull_rows(
    layer_pages: torch.Tensor,
    sources: torch.Tensor,
    page_size: int,
    rows: torch.Tensor,
    count: torch.Tensor,
    cp_size: int,
    out: torch.Tensor,
) -> None:
    """Fill the first `count` rows of out u8[*, row_bytes] with the slots that `rows` lists.

    layer_pages and sources: as for `pull_pages`, in scratch order. rows i32[capacity], count
    i32[1]: on the device, see `SelectedRows`. For formats of one section whose rows are whole
    multiples of 16 bytes, all on one device; nothing is checked here.
    """
    row_words = out.shape[1] // WORD_BYTES
    # Stripes round up, so the last of them may reach that many blocks past the capacity.
    _pull_rows[(triton.cdiv(len(rows), ROWS) + cp_size,)](
        layer_pages.view(torch.int64),
        sources,
        rows,
        count,
        out.view(torch.int64),
        page_size,
        row_words,
        cp_size,
        ROWS,
        triton.next_power_of_2(row_words),
        num_warps=WARPS,
    )


@triton.jit
def _pull_rows(
    layer_words,
    sources,
    rows,
    count,
    out,
    PAGE_SIZE: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    CP_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
):
    selected = tl.load(count)
    blocks = (selected + ROWS - 1) // ROWS
    # Slots go owner after owner. Programs that run at the same time take from distant places of
    # the list, so that every link is in use from the first to the last.
    stripe = (blocks + CP_SIZE - 1) // CP_SIZE
    program = tl.program_id(0)
    block = program % CP_SIZE * stripe + program // CP_SIZE
    if (program // CP_SIZE < stripe) & (block < blocks):
        item = block * ROWS + tl.arange(0, ROWS)
        inside = item < selected
        slot = tl.load(rows + item, mask=inside, other=0)
        page = slot // PAGE_SIZE
        source = tl.load(sources + page, mask=inside, other=0) + slot % PAGE_SIZE * ROW_WORDS
        source = tl.multiple_of(source, [2])
        word = tl.arange(0, ROW_BLOCK)[None, :]
        mask = inside[:, None] & (word < ROW_WORDS)
        words = tl.load(layer_words + source[:, None] + word, mask=mask)
        tl.store(out + item.to(tl.int64)[:, None] * ROW_WORDS + word, words, mask=mask)

"""Writes of the rows that this rank owns, straight into its pages: quantised, packed, placed.

The reference is `encode` and `scatter_rows` of the same format in memory/formats, on the rows of
the plan. Without a mask over tokens and without a wait of the host: which rows are owned, and
where they go, is in tensors made once a batch. A place on the padding page is not written, so a
plan may be padded to the length that a CUDA graph was captured with.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cp_shared_kv.kernels.block_fp8 import BLOCK, converts_to_e4m3, quantise

ROWS = 4
"""Rows that one program writes."""
WARPS = 4


def store_plain(
    pages: torch.Tensor,
    page_size: int,
    parts: list[torch.Tensor],
    rows: torch.Tensor,
    physical_locs: torch.Tensor,
) -> None:
    """Rows of one or two parts as they are, side by side.

    pages u8[*, page_bytes]; parts [T, width] of the stored type, each contiguous in a row;
    rows i64[K] of 0..T-1; physical_locs i64[K], their places in the pages.
    """
    bits = {2: torch.int16, 4: torch.int32}[parts[0].itemsize]
    first, last = parts[0].view(bits), parts[-1].view(bits)
    widths = [part.shape[1] for part in parts]
    if len(rows):
        _store_plain[(triton.cdiv(len(rows), ROWS),)](
            first,
            last,
            rows,
            physical_locs,
            len(rows),
            pages.view(bits),
            first.stride(0),
            last.stride(0),
            page_size,
            widths[0],
            sum(widths[1:]),
            ROWS,
            triton.next_power_of_2(widths[0]),
            triton.next_power_of_2(max(1, sum(widths[1:]))),
            num_warps=WARPS,
        )


def store_fp8_latent(
    pages: torch.Tensor,
    page_size: int,
    latent: torch.Tensor,
    k_pe: torch.Tensor,
    rows: torch.Tensor,
    physical_locs: torch.Tensor,
    *,
    power_of_two: bool,
) -> None:
    """Rows of the format fp8_ds_mla: e4m3 latent, its scales, bf16 rope.

    pages u8[*, page_bytes]; latent [T, width], any float, width a multiple of 128; k_pe
    bf16[T, rope]; rows and physical_locs as for `store_plain`.
    """
    blocks = latent.shape[1] // BLOCK.value
    if len(rows):
        _store_fp8_latent[(triton.cdiv(len(rows), ROWS),)](
            latent,
            k_pe.view(torch.int16),
            rows,
            physical_locs,
            len(rows),
            pages,
            latent.stride(0),
            k_pe.stride(0),
            page_size,
            blocks,
            k_pe.shape[1],
            ROWS,
            triton.next_power_of_2(blocks),
            triton.next_power_of_2(k_pe.shape[1]),
            power_of_two,
            converts_to_e4m3(pages.device),
            num_warps=WARPS,
        )


def store_fp8_index(
    pages: torch.Tensor,
    page_size: int,
    index_k: torch.Tensor,
    rows: torch.Tensor,
    physical_locs: torch.Tensor,
    *,
    power_of_two: bool,
) -> None:
    """Rows of the format fp8_scaled: in each page the e4m3 keys of all tokens, then the scales.

    pages u8[*, page_bytes]; index_k [T, 128], any float; rows and physical_locs as for
    `store_plain`.
    """
    rows_a_program = 2 * ROWS
    if len(rows):
        _store_fp8_index[(triton.cdiv(len(rows), rows_a_program),)](
            index_k,
            rows,
            physical_locs,
            len(rows),
            pages,
            index_k.stride(0),
            page_size,
            rows_a_program,
            power_of_two,
            converts_to_e4m3(pages.device),
            num_warps=WARPS,
        )


@triton.jit
def _plan_rows(rows, physical_locs, count, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr):
    """The rows of this program, their places, and which of them are to be written."""
    item = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = item < count
    # All layers come back to the plan, and everything else here waits for it.
    row = tl.load(rows + item, mask=inside, other=0, eviction_policy="evict_last")
    loc = tl.load(physical_locs + item, mask=inside, other=0, eviction_policy="evict_last")
    return row, loc, loc >= PAGE_SIZE


@triton.jit(do_not_specialize=["count"])
def _store_plain(
    first,
    last,
    rows,
    physical_locs,
    count,
    pages,
    first_stride,
    last_stride,
    PAGE_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    ROWS: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    LAST_BLOCK: tl.constexpr,
):
    row, loc, live = _plan_rows(rows, physical_locs, count, PAGE_SIZE, ROWS)
    target = pages + loc[:, None] * (FIRST + LAST)
    column = tl.arange(0, FIRST_BLOCK)[None, :]
    mask = live[:, None] & (column < FIRST)
    values = tl.load(first + row[:, None] * first_stride + column, mask=mask)
    tl.store(target + column, values, mask=mask)
    if LAST > 0:
        column = tl.arange(0, LAST_BLOCK)[None, :]
        mask = live[:, None] & (column < LAST)
        values = tl.load(last + row[:, None] * last_stride + column, mask=mask)
        tl.store(target + FIRST + column, values, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _store_fp8_latent(
    latent,
    k_pe,
    rows,
    physical_locs,
    count,
    pages,
    latent_stride,
    k_pe_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
):
    ROW_BYTES: tl.constexpr = BLOCKS * (BLOCK + 4) + 2 * ROPE
    row, loc, live = _plan_rows(rows, physical_locs, count, PAGE_SIZE, ROWS)
    target = loc * ROW_BYTES
    block = tl.arange(0, BLOCKS_BLOCK)
    column = block[None, :, None] * BLOCK + tl.arange(0, BLOCK)[None, None, :]
    mask = live[:, None, None] & (block < BLOCKS)[None, :, None]
    values = tl.load(latent + row[:, None, None] * latent_stride + column, mask=mask, other=0.0)
    codes, scales = quantise(values.to(tl.float32), POWER_OF_TWO, NATIVE)
    tl.store(pages + target[:, None, None] + column, codes, mask=mask)
    target += BLOCKS * BLOCK
    scale = pages.to(tl.pointer_type(tl.float32)) + target[:, None] // 4 + block[None, :]
    tl.store(scale, scales, mask=live[:, None] & (block < BLOCKS)[None, :])
    target += BLOCKS * 4
    column = tl.arange(0, ROPE_BLOCK)[None, :]
    mask = live[:, None] & (column < ROPE)
    rope = tl.load(k_pe + row[:, None] * k_pe_stride + column, mask=mask)
    tl.store(pages.to(tl.pointer_type(tl.int16)) + target[:, None] // 2 + column, rope, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _store_fp8_index(
    index_k,
    rows,
    physical_locs,
    count,
    pages,
    stride,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row, loc, live = _plan_rows(rows, physical_locs, count, PAGE_SIZE, ROWS)
    column = tl.arange(0, BLOCK)[None, None, :]
    mask = live[:, None, None]
    values = tl.load(index_k + row[:, None, None] * stride + column, mask=mask, other=0.0)
    codes, scales = quantise(values.to(tl.float32), POWER_OF_TWO, NATIVE)
    # Two sections: the keys of all tokens of the page, then their scales.
    page, offset = loc // PAGE_SIZE, loc % PAGE_SIZE
    start = page * (PAGE_SIZE * (BLOCK + 4))
    key = start + offset * BLOCK
    tl.store(pages + key[:, None, None] + column, codes, mask=mask)
    scale = (start + PAGE_SIZE * BLOCK) // 4 + offset
    scales = tl.reshape(scales, (ROWS,))
    tl.store(pages.to(tl.pointer_type(tl.float32)) + scale, scales, mask=live)

"""Rows of the format fp8_ds_mla as bf16, gathered and decoded in one launch.

The reference is `decode` of the format in memory/formats/fp8_ds_mla.py on the gathered rows.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cp_shared_kv.kernels.block_fp8 import BLOCK, converts_to_e4m3, from_e4m3

ROWS = 4
"""Rows that one program decodes."""
WARPS = 4


def decode_fp8_latent(
    rows: torch.Tensor, slots: torch.Tensor | None, latent: int, rope: int
) -> torch.Tensor:
    """bf16[n, latent + rope]: latent and rotated key side by side, of rows[slots] or of all rows.

    rows u8[*, latent + latent / 32 + 2 * rope], contiguous, a multiple of 4 bytes wide; slots
    int32 or int64 [n], contiguous: what one below 0 gives is not written. latent is a multiple of
    128.
    """
    count = len(rows) if slots is None else len(slots)
    blocks = latent // BLOCK.value
    out = torch.empty(count, latent + rope, dtype=torch.bfloat16, device=rows.device)
    if count:
        _decode_fp8_latent[(triton.cdiv(count, ROWS),)](
            rows,
            rows.view(torch.float32),
            rows.view(torch.int16),
            rows if slots is None else slots,
            out.view(torch.int16),
            count,
            slots is not None,
            blocks,
            triton.next_power_of_2(blocks),
            rope,
            triton.next_power_of_2(rope),
            rows.shape[1],
            ROWS,
            converts_to_e4m3(rows.device),
            num_warps=WARPS,
        )
    return out


@triton.jit
def _bf16_bits(values, NATIVE: tl.constexpr):
    """fp32 -> i16 bits of the nearest bf16, ties to even. Triton's interpreter would truncate."""
    if NATIVE:
        nearest = values.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        nearest = tl.where(is_nan, 0x7FC0, rounded).to(tl.int16)
    return nearest


@triton.jit(do_not_specialize=["count"])
def _decode_fp8_latent(
    codes,
    scales,
    ropes,
    slots,
    out,
    count,
    BY_SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = item < count
    row = item
    if BY_SLOTS:
        row = tl.load(slots + item, mask=valid, other=-1).to(tl.int64)
        valid = row >= 0
    LATENT: tl.constexpr = BLOCKS * BLOCK
    block = tl.arange(0, PADDED_BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    a_block = valid[:, None] & (block < BLOCKS)[None, :]
    code = tl.load(
        codes + row[:, None, None] * ROW_BYTES + column[None, :, :],
        mask=a_block[:, :, None],
        other=0,
    )
    scale = tl.load(
        scales + row[:, None] * (ROW_BYTES // 4) + LATENT // 4 + block[None, :],
        mask=a_block,
        other=0.0,
    )
    place = item * (LATENT + ROPE)
    values = from_e4m3(code, NATIVE) * scale[:, :, None]
    tl.store(
        out + place[:, None, None] + column[None, :, :],
        _bf16_bits(values, NATIVE),
        mask=a_block[:, :, None],
    )
    in_rope = tl.arange(0, PADDED_ROPE)
    a_value = valid[:, None] & (in_rope < ROPE)[None, :]
    rope_start = (LATENT + BLOCKS * 4) // 2
    rope = tl.load(
        ropes + row[:, None] * (ROW_BYTES // 2) + rope_start + in_rope[None, :],
        mask=a_value,
        other=0,
    )
    tl.store(out + place[:, None] + LATENT + in_rope[None, :], rope, mask=a_value)

"""Absorbed MLA over selected rows, which are read where they are and never gathered first.

One program has a token's queries of some heads and goes through the token's rows by tiles, with a
running softmax; for decode and for prefill alike. The reference is `sparse_attention` in
model/ops/reference.py on the gathered rows.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

TILE_ROWS = 32
MOST_HEADS = 64
LEAST_HEADS = 16
"""Of one program: the accumulator of 64 heads fills its registers, fewer than 16 are padded."""
WARPS = 8


def sparse_attention(
    q_latent: torch.Tensor,
    q_pe: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of q_latent [n, H, r] and q_pe [n, H, dr] to rows[slots]; returns [n, H, r].

    rows [*, r + dr]: latent and rotated key side by side, of the queries' type; slots i64[n, k],
    contiguous, below 0 for none, but for the first of each token. r and dr are powers of two of
    16 or more. Products and sums in fp32, the softmax's weights rounded to the rows' type.
    """
    tokens, heads, latent = q_latent.shape
    # Not empty_like: of a part of a transposed tensor it has other strides than the part itself.
    out = q_latent.new_empty(q_latent.shape)
    padded_heads = min(MOST_HEADS, max(LEAST_HEADS, triton.next_power_of_2(heads)))
    if tokens:
        # On one axis: the others end at 65,535 programs, and a rank may have more tokens.
        _sparse_attention[(tokens * triton.cdiv(heads, padded_heads),)](
            q_latent,
            q_pe,
            rows,
            slots,
            out,
            scale * math.log2(math.e),
            slots.shape[1],
            q_latent.stride(0),
            q_latent.stride(1),
            q_pe.stride(0),
            q_pe.stride(1),
            heads,
            padded_heads,
            latent,
            q_pe.shape[2],
            TILE_ROWS,
            num_warps=WARPS,
            num_stages=2,
        )
    return out


@triton.jit(do_not_specialize=["count", "token_stride", "head_stride"])
def _sparse_attention(
    q_latent,
    q_pe,
    rows,
    slots,
    out,
    scale,
    count,
    token_stride,
    head_stride,
    pe_token_stride,
    pe_head_stride,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    TILE: tl.constexpr,
):
    parts: tl.constexpr = (HEADS + PADDED_HEADS - 1) // PADDED_HEADS
    head = tl.program_id(0) % parts * PADDED_HEADS + tl.arange(0, PADDED_HEADS)
    token = (tl.program_id(0) // parts).to(tl.int64)
    a_head = (head < HEADS)[:, None]
    in_latent = tl.arange(0, LATENT)
    in_rope = tl.arange(0, ROPE)
    # The strides are multiples of the widths, which Triton cannot see.
    begin = tl.multiple_of(token * token_stride + head.to(tl.int64) * head_stride, 16)
    place = begin[:, None] + in_latent[None, :]
    query = tl.load(q_latent + place, mask=a_head, other=0.0)
    pe_place = (token * pe_token_stride + head * pe_head_stride)[:, None] + in_rope[None, :]
    pe_query = tl.load(q_pe + pe_place, mask=a_head, other=0.0)
    largest = tl.full([PADDED_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_HEADS], tl.float32)
    mean = tl.zeros([PADDED_HEADS, LATENT], tl.float32)
    for start in range(0, count, TILE):
        number = start + tl.arange(0, TILE)
        slot = tl.load(slots + token * count + number, mask=number < count, other=-1)
        valid = slot >= 0
        # A row that is none is not read: what lies there may be no number.
        row = rows + slot[:, None] * (LATENT + ROPE)
        latent = tl.load(row + in_latent[None, :], mask=valid[:, None], other=0.0)
        pe = tl.load(row + LATENT + in_rope[None, :], mask=valid[:, None], other=0.0)
        logits = tl.dot(query, tl.trans(latent), input_precision="ieee")
        logits += tl.dot(pe_query, tl.trans(pe), input_precision="ieee")
        logits = tl.where(valid[None, :], logits * scale, float("-inf"))
        now_largest = tl.maximum(largest, tl.max(logits, axis=1))
        shrink = tl.exp2(largest - now_largest)
        weights = tl.exp2(logits - now_largest[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        mean = mean * shrink[:, None]
        mean += tl.dot(weights.to(latent.dtype), latent, input_precision="ieee")
        largest = now_largest
    out_begin = (token * HEADS + head.to(tl.int64)) * LATENT
    out_place = out_begin[:, None] + in_latent[None, :]
    tl.store(out + out_place, (mean / total[:, None]).to(out.dtype.element_ty), mask=a_head)

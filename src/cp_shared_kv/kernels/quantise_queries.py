"""The indexer's queries as e4m3, their scales moved into the head weights, in one launch.

A scale is positive, so it may move out of the relu of the index scores. The reference is
`quantise` in memory/formats/block_fp8.py.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cp_shared_kv.kernels.block_fp8 import BLOCK, converts_to_e4m3, quantise

HEADS = 16
"""Heads that one program quantises."""
WARPS = 4


def quantise_queries(
    q: torch.Tensor, head_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, heads, 128], any float, and head_weights fp32[n, heads], both contiguous -> codes
    u8[n, heads, 128] and weights fp32[n, heads] of them."""
    codes = torch.empty(q.shape, dtype=torch.uint8, device=q.device)
    weights = torch.empty_like(head_weights)
    count = head_weights.numel()
    if count:
        _quantise_queries[(triton.cdiv(count, HEADS),)](
            q, head_weights, codes, weights, count, HEADS, converts_to_e4m3(q.device),
            num_warps=WARPS,
        )  # fmt: skip
    return codes, weights


@triton.jit(do_not_specialize=["count"])
def _quantise_queries(
    q, head_weights, codes, weights, count, HEADS: tl.constexpr, NATIVE: tl.constexpr
):
    head = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    inside = head < count
    one = tl.arange(0, 1)
    place = head[:, None, None] * BLOCK + one[None, :, None] + tl.arange(0, BLOCK)[None, None, :]
    values = tl.load(q + place, mask=inside[:, None, None], other=0.0).to(tl.float32)
    code, scale = quantise(values, False, NATIVE)
    tl.store(codes + place, code, mask=inside[:, None, None])
    weight = tl.load(head_weights + head, mask=inside, other=0.0)
    tl.store(weights + head[:, None] + one[None, :], weight[:, None] * scale, mask=inside[:, None])

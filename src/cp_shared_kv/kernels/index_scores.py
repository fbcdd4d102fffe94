"""The indexer's scores of a block of queries against all keys, without the products of each head.

One program has a tile of keys and goes through some of the queries: a matrix product of a query's
heads with the keys, relu, and the weighted sum over the heads, all in registers. The reference is
`index_scores` in model/ops/reference.py, which multiplies in fp32.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

KEYS = 128
ROWS = 16
"""Queries that one program goes through."""
LEAST_HEADS = 16
"""The narrowest matrix product; fewer heads are padded."""
WARPS = 8


def index_scores(
    q: torch.Tensor,
    head_weights: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32[n, m]: sum_h head_weights[t, h] * relu(q[t, h] . keys[s]), products and sums in fp32.

    q [n, heads, width] and keys [m, width], of one float type, and head_weights fp32[n, heads], all
    contiguous; width a power of two of 16 or more, of 32 for e4m3. With scales fp32[m] the score of
    each key is multiplied by its own.
    """
    rows, heads, width = q.shape
    count = len(keys)
    scores = torch.empty(rows, count, dtype=torch.float32, device=q.device)
    _index_scores[(triton.cdiv(count, KEYS), triton.cdiv(rows, ROWS))](
        q,
        head_weights,
        keys,
        keys if scales is None else scales,
        scores,
        rows,
        count,
        heads,
        max(LEAST_HEADS, triton.next_power_of_2(heads)),
        width,
        scales is not None,
        ROWS,
        KEYS,
        num_warps=WARPS,
    )
    return scores


@triton.jit(do_not_specialize=["rows", "count"])
def _index_scores(
    q,
    head_weights,
    keys,
    scales,
    scores,
    rows,
    count,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    head = tl.arange(0, PADDED_HEADS)
    dimension = tl.arange(0, WIDTH)
    a_key = (key < count)[None, :]
    # Transposed as it is loaded: [WIDTH, KEYS].
    tile = tl.load(
        keys + key[None, :].to(tl.int64) * WIDTH + dimension[:, None], mask=a_key, other=0.0
    )
    if SCALED:
        scale = tl.load(scales + key, mask=key < count, other=0.0)
    first = tl.program_id(1) * ROWS
    for turn in range(tl.minimum(rows - first, ROWS)):
        row = (first + turn).to(tl.int64)
        queries = tl.load(
            q + (row * HEADS + head[:, None]) * WIDTH + dimension[None, :],
            mask=(head < HEADS)[:, None],
            other=0.0,
        )
        weights = tl.load(head_weights + row * HEADS + head, mask=head < HEADS, other=0.0)
        products = tl.maximum(tl.dot(queries, tile, input_precision="ieee"), 0.0)
        score = tl.sum(products * weights[:, None], axis=0)
        if SCALED:
            score *= scale
        tl.store(scores + row * count + key, score, mask=key < count)

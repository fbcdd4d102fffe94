"""The indexer's scores of a block of queries against all keys, without the products of each head.

One program has a tile of keys and goes through some of the queries, two at a time: a matrix product
of the keys with the heads of both, relu, and the weighted sums over the heads, all in registers. A
key's products with all heads lie in few threads, which makes that sum cheap: with keys for columns
it took twice the time. The reference is `index_scores` in model/ops/reference.py, in fp32.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

KEYS = 256
MOST_ROWS, LEAST_ROWS = 128, 8
"""Queries that one program goes through: as many as leave work for every multiprocessor."""
PROGRAMS = 512
LEAST_HEADS = 16
"""The narrowest matrix product; fewer heads are padded."""
STAGES = 3


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
    tiles = triton.cdiv(count, KEYS)
    rows_each = triton.next_power_of_2(triton.cdiv(rows * tiles, PROGRAMS))
    rows_each = min(MOST_ROWS, max(LEAST_ROWS, rows_each))
    _index_scores[(tiles, triton.cdiv(rows, rows_each))](
        q,
        head_weights,
        keys,
        keys if scales is None else scales,
        scores,
        rows,
        count,
        rows_each,
        heads,
        max(LEAST_HEADS, triton.next_power_of_2(heads)),
        width,
        scales is not None,
        KEYS,
        STAGES,
        num_warps=4 if keys.element_size() == 1 else 8,
    )
    return scores


@triton.jit(do_not_specialize=["rows", "count", "rows_each"])
def _index_scores(
    q,
    head_weights,
    keys,
    scales,
    scores,
    rows,
    count,
    rows_each,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALED: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    a_key = key < count
    dimension = tl.arange(0, WIDTH)
    tile = tl.load(
        keys + key[:, None].to(tl.int64) * WIDTH + dimension[None, :],
        mask=a_key[:, None],
        other=0.0,
    )
    if SCALED:
        scale = tl.load(scales + key, mask=a_key, other=0.0)
    pair = tl.arange(0, 2)
    column = tl.arange(0, 2 * PADDED_HEADS)
    which, head = column // PADDED_HEADS, column % PADDED_HEADS
    first = tl.program_id(1) * rows_each
    last = tl.minimum(first + rows_each, rows)
    for row in tl.range(first, last, 2, num_stages=STAGES):
        there = (head < HEADS) & (row + which < last)
        place = (row + which).to(tl.int64) * HEADS + head
        queries = tl.load(
            q + place[None, :] * WIDTH + dimension[:, None], mask=there[None, :], other=0.0
        )
        weights = tl.load(head_weights + place, mask=there, other=0.0)
        products = tl.dot(tile, queries, input_precision="ieee")
        products = tl.maximum(products, 0.0) * weights[None, :]
        score = tl.sum(tl.reshape(products, (KEYS, 2, PADDED_HEADS)), axis=2)
        if SCALED:
            score *= scale[:, None]
        tl.store(
            scores + (row + pair).to(tl.int64)[None, :] * count + key[:, None],
            score,
            mask=a_key[:, None] & (row + pair < last)[None, :],
        )

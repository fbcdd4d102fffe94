"""Exact top-k of index scores: ascending columns, of equal scores the lowest, in one launch.

One program has a row. A sample of it gives a pivot that somewhat more than k of its scores should
reach; one pass lists those by column, and the k-th best of the list is found bit by bit. Where the
pivot misled (many equal scores, say), the k-th best is searched in the whole row, slowly. Both find
the same columns, so chance changes nothing. The reference is `select_topk` in
model/ops/reference.py.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

SAMPLE = 4096
BLOCK = 4096
"""Scores that a pass looks at together."""
MOST_LISTED = 16384
WARPS = 16


def select_topk(
    scores: torch.Tensor, visible: torch.Tensor, k: int, *, most_listed: int = MOST_LISTED
) -> torch.Tensor:
    """i64[n, min(k, m)]: for each row of scores fp32[n, m] the columns of the k best among the
    first `visible` i64[n] of them, 1 or more; where these are fewer, all of them, then -1.

    Rows of scores are contiguous, and may be apart. NaN is above all; -0.0 equals 0.0.
    most_listed: a power of two, that of the list.
    """
    rows, count = scores.shape
    width = min(k, count)
    out = torch.empty(rows, width, dtype=torch.int64, device=scores.device)
    listed = torch.empty(rows, most_listed, dtype=torch.int32, device=scores.device)
    if rows:
        _select_topk[(rows,)](
            scores, visible, out, listed, scores.stride(0), count, width,
            SAMPLE, BLOCK, most_listed, num_warps=WARPS,
        )  # fmt: skip
    return out


@triton.jit
def _ordered(scores):
    """fp32 -> i32 in the same order: a NaN the largest, both zeros one."""
    bits = tl.where(scores == 0, 0.0, scores).to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores == scores, keys, 0x7FFFFFFF)


@triton.jit
def _bit(turn):
    """i32: bit 31 first."""
    return tl.full((), 1, tl.int32) << (31 - turn)


@triton.jit
def _kth_best(keys, valid, k):
    """The k-th largest of the valid keys i32[N], of which there are at least k."""
    found = tl.full((), -2147483648, tl.int32)
    for turn in range(32):
        candidate = found ^ _bit(turn)
        reach = tl.sum((valid & (keys >= candidate)).to(tl.int32))
        found = tl.where(reach >= k, candidate, found)
    return found


@triton.jit
def _chosen(keys, valid, threshold, ties_left):
    """i32[N]: 1 for what is above the threshold, and for the first `ties_left` at it; and how many
    are at it."""
    ties = (valid & (keys == threshold)).to(tl.int32)
    early = tl.cumsum(ties) <= ties_left
    chosen = valid & ((keys > threshold) | ((ties == 1) & early))
    return chosen.to(tl.int32), tl.sum(ties)


# Functions of their own: in one, Triton would carry names of unlike shapes from loop to loop.
@triton.jit
def _pivot(scores, seen, k, SAMPLE: tl.constexpr):
    """A key that somewhat more than k of the row's scores should reach."""
    number = tl.arange(0, SAMPLE)
    sampled = tl.minimum(seen, SAMPLE)
    inside = number < sampled
    place = (number.to(tl.int64) * seen // sampled).to(tl.int32)
    keys = _ordered(tl.load(scores + place, mask=inside, other=0.0))
    # Four standard deviations more than would be right on average, and a few.
    expected = sampled.to(tl.float32) * k / seen
    wanted = tl.minimum((expected + 4 * tl.sqrt(expected) + 8).to(tl.int32), sampled)
    return _kth_best(keys, inside, wanted)


@triton.jit
def _list(scores, seen, pivot, listed, BLOCK: tl.constexpr, LISTED: tl.constexpr):
    """List the columns that reach the pivot, as many as there is room for; returns how many do."""
    reach = tl.full((), 0, tl.int32)
    for start in range(0, seen, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < seen
        keys = _ordered(tl.load(scores + column, mask=inside, other=0.0))
        ones = (inside & (keys >= pivot)).to(tl.int32)
        place = reach + tl.cumsum(ones) - ones
        tl.store(listed + place, column, mask=(ones == 1) & (place < LISTED))
        reach += tl.sum(ones)
    return reach


@triton.jit
def _choose_listed(scores, k, listed, reach, out, LISTED: tl.constexpr):
    number = tl.arange(0, LISTED)
    valid = number < reach
    column = tl.load(listed + number, mask=valid, other=0)
    keys = _ordered(tl.load(scores + column, mask=valid, other=0.0))
    threshold = _kth_best(keys, valid, k)
    above = tl.sum((valid & (keys > threshold)).to(tl.int32))
    ones, _ties = _chosen(keys, valid, threshold, k - above)
    place = tl.cumsum(ones) - ones
    tl.store(out + place, column.to(tl.int64), mask=ones == 1)


@triton.jit
def _count_at_least(scores, seen, least, BLOCK: tl.constexpr):
    """How many keys of the row are so large."""
    reach = tl.full((), 0, tl.int32)
    for start in range(0, seen, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < seen
        keys = _ordered(tl.load(scores + column, mask=inside, other=0.0))
        reach += tl.sum((inside & (keys >= least)).to(tl.int32))
    return reach


@triton.jit
def _choose_from_all(scores, seen, k, out, BLOCK: tl.constexpr):
    threshold = tl.full((), -2147483648, tl.int32)
    for turn in range(32):
        candidate = threshold ^ _bit(turn)
        reach = _count_at_least(scores, seen, candidate, BLOCK)
        threshold = tl.where(reach >= k, candidate, threshold)
    ties_left = tl.full((), 0, tl.int32) + k
    if threshold < 0x7FFFFFFF:  # above which there is nothing
        ties_left -= _count_at_least(scores, seen, threshold + 1, BLOCK)
    done = tl.full((), 0, tl.int32)
    for start in range(0, seen, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < seen
        keys = _ordered(tl.load(scores + column, mask=inside, other=0.0))
        ones, ties = _chosen(keys, inside, threshold, ties_left)
        place = done + tl.cumsum(ones) - ones
        tl.store(out + place, column.to(tl.int64), mask=ones == 1)
        done += tl.sum(ones)
        ties_left = tl.maximum(ties_left - ties, 0)


@triton.jit
def _take_all(seen, k, out, BLOCK: tl.constexpr):
    for start in range(0, k, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(out + column, tl.where(column < seen, column, -1).to(tl.int64), mask=column < k)


@triton.jit(do_not_specialize=["stride", "count", "k"])
def _select_topk(
    scores,
    visible,
    out,
    listed,
    stride,
    count,
    k,
    SAMPLE: tl.constexpr,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seen = tl.minimum(tl.load(visible + row), count).to(tl.int32)
    row_scores = scores + row * stride
    row_out = out + row * k
    row_listed = listed + row * LISTED
    if seen <= k:
        _take_all(seen, k, row_out, BLOCK)
    else:
        pivot = _pivot(row_scores, seen, k, SAMPLE)
        reach = _list(row_scores, seen, pivot, row_listed, BLOCK, LISTED)
        if (reach >= k) & (reach <= LISTED):
            # What other threads have listed is read now.
            tl.debug_barrier()
            _choose_listed(row_scores, k, row_listed, reach, row_out, LISTED)
        else:
            _choose_from_all(row_scores, seen, k, row_out, BLOCK)

"""Which of a batch's new tokens each rank of the CP group computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import LayoutError
from cp_shared_kv.layout.checks import check_whole_number

SplitMode = Literal["in-seq-split", "round-robin-split"]
"""The two splits, as SGLang's --nsa-prefill-cp-mode names them."""


def split_tokens(
    mode: SplitMode, new_token_counts: Sequence[int], cp_size: int
) -> list[npt.NDArray[np.int64]]:
    """For each rank, the int64 indices of its tokens in the batch's concatenated new tokens.

    `new_token_counts` has the number of new tokens of each request; 0 is allowed, and so are
    fewer tokens than ranks. The `cp_size` arrays returned share out 0..sum-1: each index is in
    one of them, once. A rank's tokens are in order within a request, and requests in order.

    in-seq-split cuts each request into 2N consecutive segments, the first n % 2N of them one
    token longer than the rest; rank r computes segments r and 2N-1-r. The one has little before
    it to attend to and the other much, so all pairs weigh about the same (Llama 3,
    arXiv:2407.21783, section 3.3.2). round-robin-split gives token i of the batch to rank i % N.

    Not collective, but ranks agree only when all use the same arguments. LayoutError for another
    mode, a count that is no whole number >= 0, or a group without ranks.
    """
    check_whole_number("cp_size", cp_size, at_least=1)
    for request, count in enumerate(new_token_counts):
        check_whole_number(f"new_token_counts[{request}]", count, at_least=0)
    if mode == "in-seq-split":
        return _in_sequence(np.array(new_token_counts, dtype=np.int64), cp_size)
    if mode == "round-robin-split":
        total = sum(new_token_counts)
        return [np.arange(rank, total, cp_size, dtype=np.int64) for rank in range(cp_size)]
    raise LayoutError(
        "unknown sequence split",
        value=repr(mode),
        allowed=", ".join(get_args(SplitMode)),
        change="choose one of these",
    )


def _in_sequence(counts: npt.NDArray[np.int64], cp_size: int) -> list[npt.NDArray[np.int64]]:
    segments = 2 * cp_size
    longer = np.arange(segments) < counts[:, None] % segments
    lengths = counts[:, None] // segments + longer
    # Segments lie one behind the other, and so do requests.
    starts = (np.cumsum(lengths) - lengths.ravel()).reshape(lengths.shape)
    pairs = ([rank, segments - 1 - rank] for rank in range(cp_size))
    return [_ranges(starts[:, pair].ravel(), lengths[:, pair].ravel()) for pair in pairs]


def _ranges(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """start, start + 1, ... of each range, `lengths` many, joined in order."""
    joined_before = np.cumsum(lengths) - lengths
    return np.repeat(starts - joined_before, lengths) + np.arange(lengths.sum())

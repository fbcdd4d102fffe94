"""Temperature, and which tokens may be drawn at all. A token that may not has score -inf.

All but top-p are exact and work on each number alone, and top-p works on each row alone: a row
comes out the same, to the bit, whatever other rows are beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

NUCLEUS_GUESS_TOKENS = 1024
"""A nucleus seldom has more; sorting a vocabulary of 150,000 takes seven times as long."""


def scale(scores: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """Divide rows by their temperatures, all above 0; the largest of each row becomes 0.

    `scores` float32[rows, vocab]. Taking the largest off first keeps float32 from overflowing.
    """
    # A row in which everything is masked has no largest; it stays masked.
    least = torch.finfo(scores.dtype).min
    largest = scores.amax(dim=-1, keepdim=True).clamp(min=least)
    return (scores - largest) / _column(scores, temperatures)


def keep_min_p(scores: torch.Tensor, min_p: Sequence[float]) -> torch.Tensor:
    """Keep tokens at least `min_p` times as likely as the likeliest (arXiv 2407.01082); 0: all.

    `scores` as `scale` leaves them: the largest of each row is 0.
    """
    if not any(min_p):
        return scores
    # exp(score) is the ratio of a token's probability to the largest.
    return scores.masked_fill(scores < _column(scores, min_p).log(), -torch.inf)


def keep_top_k(scores: torch.Tensor, top_k: Sequence[int]) -> torch.Tensor:
    """Keep the `top_k` highest scores of each row, and all that equal the last of them; 0: all.

    As in Hugging Face and vLLM, more are kept only where scores are equal.
    """
    vocab = scores.shape[-1]
    ranks = [min(k, vocab) for k in top_k]
    if not any(ranks):
        return scores
    highest = scores.topk(max(ranks), dim=-1).values
    # Row by row the score of rank k; a row without top_k has no bound.
    at = torch.tensor([[max(k, 1) - 1] for k in ranks], device=scores.device)
    bound = highest.gather(-1, at)
    bound[torch.tensor([k == 0 for k in ranks], device=scores.device)] = -torch.inf
    return scores.masked_fill(scores < bound, -torch.inf)


def keep_top_p(scores: torch.Tensor, top_p: Sequence[float]) -> torch.Tensor:
    """Keep the fewest tokens whose probabilities add up to `top_p` or more (arXiv 1904.09751).

    From the likeliest down, the lowest id first among equals. 1 keeps all.
    """
    if all(p >= 1.0 for p in top_p):
        return scores
    kept = scores.clone()
    for row, p in enumerate(top_p):
        if p < 1.0:
            nucleus = _nucleus(scores[row], p)
            kept[row] = torch.full_like(kept[row], -torch.inf)
            kept[row, nucleus] = scores[row, nucleus]
    return kept


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Token ids, int64, of one row's nucleus."""
    probabilities = torch.softmax(scores.double(), dim=-1)
    bound = probabilities.topk(min(NUCLEUS_GUESS_TOKENS, len(scores))).values[-1]
    # In ascending order, equal ones all in or all out, and none that other filters took away.
    ids = torch.nonzero((probabilities >= bound) & (probabilities > 0)).squeeze(-1)
    if float(probabilities[ids].sum()) < top_p:
        ids = torch.arange(len(scores), device=scores.device)
    ordered, order = torch.sort(probabilities[ids], descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    return ids[order[before < top_p]]


def _column(scores: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    column = np.asarray(values, dtype=np.float32)[:, None]
    return torch.from_numpy(column).to(scores.device, scores.dtype)

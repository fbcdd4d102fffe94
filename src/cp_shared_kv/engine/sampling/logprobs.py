"""Log-probabilities of chosen tokens and of the likeliest, from unmodified logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_shared_kv.transfer.sampling_params import SampledLogprobs


def token_logprobs(
    logits: torch.Tensor, chosen: Sequence[int], alternatives: Sequence[int]
) -> list[SampledLogprobs]:
    """For each row the log-probability of its chosen token and the likeliest `alternatives`.

    `logits`: float[rows, vocab], unmodified. Natural logarithms, in float32.
    """
    every = torch.log_softmax(logits.float(), dim=-1)
    return [
        SampledLogprobs(logprob=float(row[token]), top=_likeliest(row, count))
        for row, token, count in zip(every, chosen, alternatives, strict=True)
    ]


def _likeliest(row: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    count = min(count, len(row))
    if not count:
        return ()
    # topk leaves the order of equal values open: it only says where to cut.
    ids = torch.nonzero(row >= row.topk(count).values[-1]).squeeze(-1)
    values, order = torch.sort(row[ids], descending=True, stable=True)
    return tuple(zip(ids[order[:count]].tolist(), values[:count].tolist(), strict=True))

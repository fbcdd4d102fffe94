"""The most likely token of each row; ties go to the lowest token id."""

from __future__ import annotations

import torch


def sample_greedy(logits: torch.Tensor) -> list[int]:
    """The most likely token of each row. `logits`: float[rows, vocab], no NaN.

    torch.argmax leaves the choice among equal maxima open, so the lowest index is taken by hand:
    a replay must give the same token on every machine.
    """
    if logits.shape[0] == 0:
        return []
    best = logits.max(dim=-1, keepdim=True).values
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == best, ids, logits.shape[-1]).min(dim=-1).values.tolist()

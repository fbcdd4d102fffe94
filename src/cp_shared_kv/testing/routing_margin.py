"""By how much a router of transformers has decided, so that a near tie is known to be one."""

from __future__ import annotations

from typing import Any

import torch

SURE_ROUTING_MARGIN = 2e-6
"""Where the scores of the last chosen and the first left out differ by less, fp32 rounding may
exchange them: another order of sums is enough, and the row then differs as a whole."""


def least_routing_margin(gate: Any, hidden: torch.Tensor) -> float:
    """The least margin of any row of hidden[..., hidden], between groups or between experts.

    `gate` is the router of transformers' DeepSeek or GLM; the scores are computed anew in fp64.
    """
    x = hidden.flatten(0, -2).double()
    scores = (x @ gate.weight.double().T).sigmoid() + gate.e_score_correction_bias.double()
    by_group = scores.unflatten(1, (gate.num_group, -1))
    group_scores = by_group.topk(2, dim=2).values.sum(2)
    groups = group_scores.topk(gate.topk_group, dim=1).indices
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, groups, True)
    eligible = by_group.masked_fill(~chosen.unsqueeze(2), float("-inf")).flatten(1)
    return min(_least_gap(group_scores, gate.topk_group), _least_gap(eligible, gate.top_k))


def _least_gap(scores: torch.Tensor, chosen: int) -> float:
    """The least difference of the last chosen and the first left out; inf where none is left."""
    if chosen == scores.shape[1]:
        return float("inf")
    best = scores.topk(chosen + 1, dim=1).values
    return float((best[:, chosen - 1] - best[:, chosen]).min())

"""The feed-forward blocks: a gated MLP, and a mixture of such experts."""

from __future__ import annotations

import torch
from torch.nn import functional

from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.weights import MLPWeights, MoEWeights


def gated_mlp(x: torch.Tensor, gate_up_proj: torch.Tensor, down_proj: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)) of x[t, hidden]."""
    gate, up = functional.linear(x, gate_up_proj).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down_proj)


class FeedForward:
    """A layer's dense MLP."""

    def __init__(self, weights: MLPWeights) -> None:
        self._weights = weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The MLP of normed hidden states x[t, hidden]."""
        return gated_mlp(x, self._weights.gate_up_proj, self._weights.down_proj)


class MixtureOfExperts:
    """A layer's routed experts, with the shared expert beside them unscaled."""

    def __init__(self, config: ModelConfig, weights: MoEWeights) -> None:
        self._config, self._weights = config, weights
        self._shared = FeedForward(weights.shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The chosen experts' weighted sum of x[t, hidden], plus the shared expert."""
        weights = self._weights
        experts, shares = self.route(x)
        mixed = self._shared.forward(x)
        # Rows in the order of their expert, so that each expert works on one slice.
        order = experts.flatten().argsort(stable=True)
        rows = order // experts.shape[1]
        counts = experts.flatten().bincount(minlength=len(weights.router)).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            part = slice(start, start + count)
            start += count
            out = gated_mlp(x[rows[part]], weights.gate_up_proj[expert], weights.down_proj[expert])
            share = shares.flatten()[order[part]].unsqueeze(1)
            mixed.index_add_(0, rows[part], (out * share).to(x.dtype))
        return mixed

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts i64[t, num_experts_per_tok] with their fp32 shares (DeepSeek-V3, eq. 12).

        The correction bias only chooses: first whole groups, by the sum of their two best, then
        experts within them.
        """
        config, weights = self._config, self._weights
        scores = functional.linear(x.float(), weights.router).sigmoid()
        group_size = config.n_routed_experts // config.n_group
        by_group = (scores + weights.correction_bias).view(len(x), config.n_group, group_size)
        group_scores = by_group.topk(2, dim=-1).values.sum(-1)
        groups = group_scores.topk(config.topk_group, dim=-1).indices
        left_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, groups, False)
        eligible = by_group.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(1)
        experts = eligible.topk(config.num_experts_per_tok, dim=-1).indices
        shares = scores.gather(1, experts)
        if config.norm_topk_prob:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return experts, shares * config.routed_scaling_factor

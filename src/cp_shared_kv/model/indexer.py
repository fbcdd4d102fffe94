"""The lightning indexer: which earlier tokens each query attends to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.kv_access import IndexKeys, KVAccess
from cp_shared_kv.model.ops.interface import AttentionOps
from cp_shared_kv.model.query_blocks import RequestBlocks
from cp_shared_kv.model.rope import Rotation
from cp_shared_kv.model.running_topk import RunningTopK
from cp_shared_kv.model.weights import IndexerWeights

_KEY_NORM_EPS = 1e-6  # of the LayerNorm; config.json does not have it
_Scores = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""Queries, head weights and a number of keys to fp32[n, m]."""


class Indexer:
    """One layer's indexer (DeepSeek-V3.2 report, equation 1)."""

    def __init__(self, config: ModelConfig, weights: IndexerWeights, ops: AttentionOps) -> None:
        self._config, self._weights, self._ops = config, weights, ops
        # Both scales of the equation are positive, so they may move from the dot products,
        # inside the relu, to the few head weights.
        self._head_scale = (config.index_n_heads * config.index_head_dim) ** -0.5

    def keys(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """The index keys [t, dI] of normed hidden states x[t, hidden], as they are stored."""
        weights = self._weights
        projected = functional.linear(x, weights.k_proj).float()
        normed = functional.layer_norm(
            projected,
            projected.shape[-1:],
            weights.k_norm_weight,
            weights.k_norm_bias,
            _KEY_NORM_EPS,
        )
        return self._rotated(normed.to(x.dtype).unsqueeze(1), rotation).squeeze(1)

    def select(
        self,
        x: torch.Tensor,
        q_residual: torch.Tensor,
        rotation: Rotation,
        requests: Sequence[RequestBlocks],
        layer: int,
        kv: KVAccess,
    ) -> torch.Tensor:
        """The slots i64[t, k] that each row attends to, by ascending position, padded with -1.

        k is index_topk, or less where no row of the batch sees so many positions. Call after
        the layer's keys are stored.
        """
        config, weights = self._config, self._weights
        q = functional.linear(q_residual, weights.q_proj)
        q = q.view(len(x), config.index_n_heads, config.index_head_dim)
        q = self._rotated(q, rotation)
        head_weights = functional.linear(x.float(), weights.head_proj) * self._head_scale
        most_visible = max((len(request.slots) for request in requests), default=0)
        width = min(config.index_topk, most_visible)
        best = [
            [RunningTopK(self._ops, block.visible, config.index_topk) for block in request.blocks]
            for request in requests
        ]
        for piece in kv.index_pieces(layer):
            blocks = requests[piece.request].blocks
            scores_of = self._scores_of(piece)
            for block, its_best in zip(blocks, best[piece.request], strict=True):
                count = min(len(piece), block.most_visible - piece.start)
                if count > 0:
                    rows = slice(block.start, block.stop)
                    scores = scores_of(q[rows], head_weights[rows], count)
                    last = piece.start + count == block.most_visible
                    its_best.add(piece.start, scores, last=last)
        selected = torch.full((len(x), width), -1, dtype=torch.int64, device=x.device)
        for request, its_bests in zip(requests, best, strict=True):
            for block, its_best in zip(request.blocks, its_bests, strict=True):
                chosen = its_best.positions
                slots = request.slots[chosen.clamp(min=0)]
                selected[block.start : block.stop, : chosen.shape[1]] = torch.where(
                    chosen < 0, -1, slots
                )
        return selected

    def _scores_of(self, piece: IndexKeys) -> _Scores:
        """What scores queries against the first keys of a piece: as they are stored, if ops take
        that. Made once a piece, for keys are decoded or copied here."""
        by_codes = self._ops.index_scores_fp8
        quantised = None if by_codes is None else piece.quantised
        if by_codes is None or quantised is None:
            keys = piece.keys
            return lambda q, weights, count: self._ops.index_scores(q, weights, keys[:count])
        codes, scales = quantised
        return lambda q, weights, count: by_codes(q, weights, codes[:count], scales[:count])

    def _rotated(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Rotate the FIRST qk_rope_head_dim dimensions; MLA has them last."""
        width = self._config.qk_rope_head_dim
        turned = rotation.apply(x[..., :width], self._config.index_rope_style)
        return torch.cat([turned, x[..., width:]], dim=-1)

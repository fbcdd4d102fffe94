"""A DSA transformer that computes one rank's tokens of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional

from cp_shared_kv.memory.device_copy import to_device
from cp_shared_kv.model.attention import SparseAttention
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.kv_access import KVAccess
from cp_shared_kv.model.moe import FeedForward, MixtureOfExperts
from cp_shared_kv.model.ops.interface import AttentionOps
from cp_shared_kv.model.ops.reference import REFERENCE_OPS
from cp_shared_kv.model.query_blocks import RequestBlocks, query_blocks
from cp_shared_kv.model.rope import RotaryEmbedding, Rotation
from cp_shared_kv.model.weights import LayerWeights, MLPWeights, ModelWeights, load_weights


class DecoderLayer:
    """Attention and feed-forward, each on a normed copy and added back."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, ops: AttentionOps) -> None:
        self._eps, self._weights = config.rms_norm_eps, weights
        self._attention = SparseAttention(config, weights.attention, ops)
        self._mlp = (
            FeedForward(weights.mlp)
            if isinstance(weights.mlp, MLPWeights)
            else MixtureOfExperts(config, weights.mlp)
        )

    def forward(
        self,
        hidden: torch.Tensor,
        rotation: Rotation,
        requests: Sequence[RequestBlocks],
        layer: int,
        kv: KVAccess,
        shared: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer of hidden[t, hidden], and the slots that its attention had selected.

        `shared` are those of the layer before. Collective: it stores the layer's KV.
        """
        normed = self._norm(hidden, self._weights.input_norm)
        attended, selected = self._attention.forward(normed, rotation, requests, layer, kv, shared)
        hidden = hidden + attended
        normed = self._norm(hidden, self._weights.post_attention_norm)
        return hidden + self._mlp.forward(normed), selected

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._eps)


class Transformer:
    """The model: weights and arithmetic, no state between forwards."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, ops: AttentionOps = REFERENCE_OPS
    ) -> None:
        self.config, self._weights = config, weights
        self._rope = RotaryEmbedding(config.rope, config.qk_rope_head_dim, self.device)
        self._layers = tuple(DecoderLayer(config, layer, ops) for layer in weights.layers)

    @classmethod
    def load(
        cls,
        directory: Path | str,
        dtype: torch.dtype = torch.float32,
        ops: AttentionOps = REFERENCE_OPS,
        device: torch.device | None = None,
    ) -> Transformer:
        """Load a Hugging Face safetensors directory, into host memory or that of `device`.

        Raises CheckpointError and ConfigError.
        """
        config = ModelConfig.from_directory(directory)
        return cls(config, load_weights(Path(directory), config, dtype, device), ops)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype: of hidden states, and of what is handed to `kv.store`."""
        return self._weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where it computes."""
        return self._weights.embedding.device

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: KVAccess
    ) -> torch.Tensor:
        """Compute this rank's tokens and store their KV.

        token_ids i64[t] and positions i64[t], in host memory, are the rank's share of the batch,
        request by request as `kv.requests` says; t may be 0. Returns hidden states [t, hidden],
        before the final norm, for `logits`. Collective: every rank of the group calls it for
        every batch.
        """
        hidden = functional.embedding(to_device(token_ids, self.device), self._weights.embedding)
        rotation = self._rope.at(to_device(positions, self.device))
        requests = query_blocks(kv.requests, positions)
        selected: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            hidden, selected = layer.forward(hidden, rotation, requests, index, kv, selected)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits fp32[n, vocab] of n rows of `forward`'s hidden states. Not collective."""
        weight = self._weights.final_norm
        normed = functional.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)
        return functional.linear(normed, self._weights.lm_head).float()

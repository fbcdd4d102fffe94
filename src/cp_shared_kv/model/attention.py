"""Multi-head latent attention over the tokens that the indexer selects."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.indexer import Indexer
from cp_shared_kv.model.kv_access import KVAccess
from cp_shared_kv.model.ops.interface import AttentionOps
from cp_shared_kv.model.query_blocks import RequestBlocks, block_sizes
from cp_shared_kv.model.rope import Rotation
from cp_shared_kv.model.weights import AttentionWeights


class SparseAttention:
    """One layer's attention, in the absorbed form: what is cached is also what is attended to."""

    def __init__(self, config: ModelConfig, weights: AttentionWeights, ops: AttentionOps) -> None:
        self._config, self._weights, self._ops = config, weights, ops
        self._indexer = Indexer(config, weights.indexer, ops) if weights.indexer else None

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        requests: Sequence[RequestBlocks],
        layer: int,
        kv: KVAccess,
        shared: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of normed hidden states x[t, hidden]; stores the layer's new KV. Collective.

        Returns it with the slots i64[t, k] that each row attended to, for the next layer to pass
        as `shared`: what a layer without an indexer attends to. Only the first layer has none.
        """
        config, weights = self._config, self._weights
        q_residual = functional.linear(x, weights.q_a_proj)
        q_residual = self._norm(q_residual, weights.q_a_norm)
        latent, k_pe = functional.linear(x, weights.kv_a_proj).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        latent = self._norm(latent, weights.kv_a_norm)
        k_pe = rotation.apply(k_pe.unsqueeze(1), "interleaved").squeeze(1)
        if self._indexer is None:
            kv.store(layer, latent, k_pe, None)
            selected = shared
        else:
            kv.store(layer, latent, k_pe, self._indexer.keys(x, rotation))
            selected = self._indexer.select(x, q_residual, rotation, requests, layer, kv)
        assert selected is not None, "the config lets no first layer be without an indexer"
        q_latent, q_pe = self._queries(q_residual, rotation)
        parts = [
            self._attend(q_latent, q_pe, part, places, layer, kv)
            for part, places in kv.bring(layer, selected)
        ]
        attended = parts[0] if len(parts) == 1 else torch.cat([q_latent[:0], *parts])
        values = torch.bmm(attended.transpose(0, 1), weights.value_up.transpose(1, 2))
        return functional.linear(values.transpose(0, 1).flatten(1), weights.o_proj), selected

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)

    def _queries(
        self, q_residual: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries against latents [t, H, r] (kv_b_proj's key half absorbed) and k_pe."""
        config, weights = self._config, self._weights
        q = functional.linear(q_residual, weights.q_b_proj)
        widths = [config.qk_nope_head_dim, config.qk_rope_head_dim]
        nope, rope = q.view(len(q), config.num_attention_heads, sum(widths)).split(widths, dim=-1)
        q_latent = torch.bmm(nope.transpose(0, 1), weights.key_up).transpose(0, 1)
        return q_latent, rotation.apply(rope, "interleaved")

    def _attend(
        self,
        q_latent: torch.Tensor,
        q_pe: torch.Tensor,
        part: slice,
        places: torch.Tensor,
        layer: int,
        kv: KVAccess,
    ) -> torch.Tensor:
        """What the tokens of `part` attend to, at places i64[n, k] of these n alone."""
        config, scale = self._config, self._config.softmax_scale
        attended = self._attend_rows(q_latent[part], q_pe[part], places, layer, kv)
        if attended is not None:
            return attended
        attended = torch.empty_like(q_latent[part])
        width = config.kv_lora_rank + config.qk_rope_head_dim
        sizes = block_sizes(q_latent.device)
        step = max(1, sizes.most_gathered // max(1, places.shape[1] * width))
        # Cut where all tokens together would be, so that parts of them make the same calls.
        for first in range(part.start // step * step, part.stop, step):
            call = slice(first, min(first + step, len(q_latent)))
            here = slice(max(call.start, part.start), min(call.stop, part.stop))
            wanted = places[here.start - part.start : here.stop - part.start]
            if not sizes.whole_calls:
                call = here
            elif here != call:  # tokens of other parts look where their neighbours do, in vain
                token = torch.arange(call.start, call.stop, device=places.device)
                wanted = wanted[token.clamp(here.start, here.stop - 1) - here.start]
            valid = wanted >= 0
            # Padding reads the token's first place again: one that is written, then left out.
            readable = torch.where(valid, wanted, wanted[:, :1])
            latent, k_pe = kv.latent(layer, readable)
            found = self._ops.sparse_attention(
                q_latent[call], q_pe[call], latent, k_pe, valid, scale
            )
            attended[here.start - part.start : here.stop - part.start] = found[
                here.start - call.start : here.stop - call.start
            ]
        return attended

    def _attend_rows(
        self,
        q_latent: torch.Tensor,
        q_pe: torch.Tensor,
        places: torch.Tensor,
        layer: int,
        kv: KVAccess,
    ) -> torch.Tensor | None:
        """The same on rows that are not gathered first; None where ops or KV have no way to."""
        attend = self._ops.attend_rows
        parts = None if attend is None else kv.latent_rows(layer, places)
        if attend is None or parts is None:
            return None
        done: list[torch.Tensor] = []
        for part, rows, there in parts:
            attended = attend(q_latent[part], q_pe[part], rows, there, self._config.softmax_scale)
            if attended is None:
                return None
            done.append(attended)
        return done[0] if len(done) == 1 else torch.cat(done)

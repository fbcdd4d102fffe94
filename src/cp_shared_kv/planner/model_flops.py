"""Floating-point work of one token of a DSA transformer, by part. Counts a multiply-add as two.

From the matrices' shapes, with MLA in its absorbed form. DeepSeek-V3.2 by this: 374.2 MF for
attention's projections a layer, 27.9 MF for the indexer's, 796.4 MF for its experts.
"""

from __future__ import annotations

from cp_shared_kv.model.config import ModelConfig


def linear_flops_per_token(model: ModelConfig) -> float:
    """All matrix products of all layers whose cost does not depend on the prefix."""
    sparse = sum(model.sparse_mlp_layers)
    dense = model.num_hidden_layers - sparse
    return (
        model.num_hidden_layers * attention_projections(model)
        + len(model.index_layers) * indexer_projections(model)
        + sparse * experts(model)
        + dense * 6.0 * model.hidden_size * model.intermediate_size
    )


def attention_projections(model: ModelConfig) -> float:
    """One layer's projections around attention, those that absorb kv_b_proj included."""
    hidden, heads, latent = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
    nope, rope, value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    return 2.0 * (
        hidden * model.q_lora_rank
        + model.q_lora_rank * heads * (nope + rope)
        + hidden * (latent + rope)
        + heads * latent * (nope + value)
        + heads * value * hidden
    )


def indexer_projections(model: ModelConfig) -> float:
    """One layer's query, key and head weights of the indexer."""
    heads, width = model.index_n_heads, model.index_head_dim
    return 2.0 * (model.q_lora_rank * heads * width + model.hidden_size * (width + heads))


def experts(model: ModelConfig) -> float:
    """One layer's router, the chosen experts and the shared ones."""
    active = model.num_experts_per_tok + model.n_shared_experts
    expert = 6.0 * model.hidden_size * model.moe_intermediate_size
    return active * expert + 2.0 * model.hidden_size * model.n_routed_experts


def index_flops_per_pair(model: ModelConfig) -> float:
    """Scoring one key for one query, in one layer that has an indexer."""
    return 2.0 * model.index_n_heads * model.index_head_dim


def attention_flops_per_pair(model: ModelConfig) -> float:
    """Attending to one selected key from one query, in one layer: scores and values."""
    latent, rope = model.kv_lora_rank, model.qk_rope_head_dim
    return 2.0 * model.num_attention_heads * (2 * latent + rope)

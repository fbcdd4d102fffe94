"""The tensors of a checkpoint, by name and shape. Arithmetic alone, without torch."""

from __future__ import annotations

from cp_shared_kv.model.config import ModelConfig


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a checkpoint of this config must hold.

    Scales of fp8 weights are not among them: a weight needs them only where it is fp8.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config.vocab_size, hidden),
    }
    kinds = zip(config.full_indexer_layers, config.sparse_mlp_layers, strict=True)
    for layer, (full, sparse) in enumerate(kinds):
        attention = _attention_shapes(config) | (_indexer_shapes(config) if full else {})
        parts = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            **{f"self_attn.{name}": shape for name, shape in attention.items()},
            **{f"mlp.{name}": shape for name, shape in _mlp_shapes(config, sparse).items()},
        }
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in parts.items()})
    return shapes


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    query, latent, rope = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    return {
        "q_a_proj.weight": (query, hidden),
        "q_a_layernorm.weight": (query,),
        "q_b_proj.weight": (heads * (nope + rope), query),
        "kv_a_proj_with_mqa.weight": (latent + rope, hidden),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * (nope + value), latent),
        "o_proj.weight": (hidden, heads * value),
    }


def _indexer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, query = config.hidden_size, config.q_lora_rank
    return {
        "indexer.wq_b.weight": (config.index_n_heads * config.index_head_dim, query),
        "indexer.wk.weight": (config.index_head_dim, hidden),
        "indexer.k_norm.weight": (config.index_head_dim,),
        "indexer.k_norm.bias": (config.index_head_dim,),
        "indexer.weights_proj.weight": (config.index_n_heads, hidden),
    }


def _mlp_shapes(config: ModelConfig, sparse: bool) -> dict[str, tuple[int, ...]]:
    hidden, width = config.hidden_size, config.moe_intermediate_size
    if not sparse:
        return _gated_mlp_shapes("", hidden, config.intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (config.n_routed_experts, hidden),
        "gate.e_score_correction_bias": (config.n_routed_experts,),
        **_gated_mlp_shapes("shared_experts.", hidden, width * config.n_shared_experts),
    }
    for expert in range(config.n_routed_experts):
        shapes.update(_gated_mlp_shapes(f"experts.{expert}.", hidden, width))
    return shapes


def _gated_mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (width, hidden),
        f"{prefix}up_proj.weight": (width, hidden),
        f"{prefix}down_proj.weight": (hidden, width),
    }

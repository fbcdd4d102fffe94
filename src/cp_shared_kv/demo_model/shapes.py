"""The sizes of tiny models of both architectures, and their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cp_shared_kv.demo_model.block_fp8 import BLOCK_FP8_CONFIG
from cp_shared_kv.demo_model.byte_tokenizer import END_TOKEN, VOCABULARY


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a tiny deepseek_v32 model; the defaults are the demo's.

    `branch_scale` below 1 shrinks what each layer adds to the residual stream, so that a flipped
    selection costs less: only then can a bf16 run be compared with an fp32 one. With `block_fp8`
    the matrices that production checkpoints quantise are e4m3 with scales.
    """

    hidden_size: int = 128
    num_hidden_layers: int = 2
    first_k_dense_replace: int = 1
    num_attention_heads: int = 4
    q_lora_rank: int = 64
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    index_n_heads: int = 8
    index_head_dim: int = 32
    index_topk: int = 64
    intermediate_size: int = 256
    moe_intermediate_size: int = 64
    n_routed_experts: int = 8
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    max_position_embeddings: int = 16384
    original_max_position_embeddings: int = 512
    rope_factor: float = 32.0
    branch_scale: float = 1.0
    block_fp8: bool = False

    def config(self) -> dict[str, Any]:
        """The config.json of this shape."""
        sizes = {name: value for name, value in vars(self).items() if name not in _NO_SIZES}
        return {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "dtype": "float32",
            "vocab_size": len(VOCABULARY),
            **sizes,
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 0,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": VOCABULARY[END_TOKEN],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": self.rope_factor,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": self.original_max_position_embeddings,
            },
            **({"quantization_config": BLOCK_FP8_CONFIG} if self.block_fp8 else {}),
        }


_NO_SIZES = ("branch_scale", "block_fp8", "original_max_position_embeddings", "rope_factor")


@dataclass(frozen=True)
class GlmModelShape(ModelShape):
    """The sizes of a tiny glm_moe_dsa model: plain rope, one group of experts.

    `indexer` are the fields of config.json that say which layers share a selection.
    """

    n_group: int = 1
    topk_group: int = 1
    indexer: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def config(self) -> dict[str, Any]:
        """The config.json of this shape."""
        config = super().config()
        config.update(config.pop("indexer"))
        return config | {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rope_interleave": True,
            "indexer_rope_interleave": True,
        }

"""Models by name, so that a plan needs no download: the fields of their config.json.

DeepSeek-V3.2: deepseek-ai/DeepSeek-V3.2's config as transformers' DeepseekV32Config has it. GLM-5:
transformers' GlmMoeDsaConfig; its rope_theta and what GLM-5.2 changes (21 of 78 layers with an
indexer, 1,048,576 positions, rope_theta 8e6) from https://github.com/tenstorrent/tt-metal/pull/49315.
All three are planned with the block-fp8 weights that they are published with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cp_shared_kv.errors import CheckpointError
from cp_shared_kv.model.config import ModelConfig

_BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

_DEEPSEEK_V32: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "dtype": "bfloat16",
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": _BLOCK_FP8,
}

_GLM_5: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "vocab_size": 154_880,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202_752,
    "rope_theta": 1_000_000.0,
    "quantization_config": _BLOCK_FP8,
}

_GLM_5_2: dict[str, Any] = _GLM_5 | {
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "max_position_embeddings": 1_048_576,
    "rope_theta": 8_000_000.0,
}

BUILT_IN: dict[str, dict[str, Any]] = {
    "deepseek-v3.2": _DEEPSEEK_V32,
    "glm-5": _GLM_5,
    "glm-5.2": _GLM_5_2,
}


def model_named(model: str) -> ModelConfig:
    """A built-in model by name, or one by its directory or its config.json.

    CheckpointError when it is neither; ConfigError for a model that this package cannot run.
    """
    built_in = BUILT_IN.get(model.lower())
    if built_in is not None:
        return ModelConfig.from_dict(built_in)
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise CheckpointError(
            "no such model",
            value=model,
            allowed=f"{', '.join(BUILT_IN)}, a directory with a config.json, or that file",
        )
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError("config.json cannot be read", value=f"{path} ({error})") from error
    if not isinstance(fields, dict):
        raise CheckpointError("config.json is not a JSON object", value=path)
    return ModelConfig.from_dict(fields)

"""A few layers of DeepSeek-V3.2 at its full widths, with random weights made on the GPU.

Fewer experts than the real 256, so that the layers fit beside everything else and are made
quickly; a token goes through as many of them as in the real model.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.ops.choice import ops_for
from cp_shared_kv.model.tensor_shapes import tensor_shapes
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.model.weights import WeightLoader

LAYERS = 4
EXPERTS = 32
SHAPE = ModelShape(
    hidden_size=7168,
    num_hidden_layers=LAYERS,
    first_k_dense_replace=1,
    num_attention_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_n_heads=64,
    index_head_dim=128,
    index_topk=2048,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    max_position_embeddings=1 << 21,
    original_max_position_embeddings=4096,
    rope_factor=512.0,
)


@dataclass(frozen=True)
class RandomTensors:
    """Any tensor of the model by name, the same for the same name."""

    shapes: dict[str, tuple[int, ...]]

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        shape = self.shapes[name]
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        if name.endswith("norm.weight") or "layernorm" in name:
            return (1 + 0.1 * drawn).to(dtype)
        return (drawn / math.sqrt(shape[-1])).to(dtype)


def random_transformer(device: torch.device) -> Transformer:
    """The model in bf16 on a GPU."""
    config: dict[str, Any] = SHAPE.config()
    model = ModelConfig.from_dict(config)
    weights = WeightLoader(RandomTensors(tensor_shapes(model)), model, torch.bfloat16, device)
    _, ops = ops_for("auto", device, torch.bfloat16, model)
    return Transformer(model, weights.model(), ops)

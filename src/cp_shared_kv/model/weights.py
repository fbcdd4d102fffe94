"""A model's tensors as they are held, and how they are loaded from a Hugging Face checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from cp_shared_kv.errors import CheckpointError
from cp_shared_kv.model.checkpoint import Checkpoint
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.tensor_shapes import tensor_shapes


@dataclass(frozen=True)
class IndexerWeights:
    """Layer weights of the top-k indexer. Heads are weighed in fp32, as their sum decides."""

    q_proj: torch.Tensor  # [HI * dI, q_lora_rank]
    k_proj: torch.Tensor  # [dI, hidden]
    k_norm_weight: torch.Tensor  # fp32 [dI]
    k_norm_bias: torch.Tensor  # fp32 [dI]
    head_proj: torch.Tensor  # fp32 [HI, hidden]


@dataclass(frozen=True)
class AttentionWeights:
    """Layer weights of MLA. `key_up` and `value_up` are kv_b_proj's two halves, by head.

    A layer that shares another's selection has no indexer.
    """

    q_a_proj: torch.Tensor  # [q_lora_rank, hidden]
    q_a_norm: torch.Tensor  # [q_lora_rank]
    q_b_proj: torch.Tensor  # [H * (dn + dr), q_lora_rank]
    kv_a_proj: torch.Tensor  # [kv_lora_rank + dr, hidden]
    kv_a_norm: torch.Tensor  # [kv_lora_rank]
    key_up: torch.Tensor  # [H, dn, kv_lora_rank]
    value_up: torch.Tensor  # [H, dv, kv_lora_rank]
    o_proj: torch.Tensor  # [hidden, H * dv]
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class MLPWeights:
    """A gated MLP; gate and up are one matrix."""

    gate_up_proj: torch.Tensor  # [2 * intermediate, hidden]
    down_proj: torch.Tensor  # [hidden, intermediate]


@dataclass(frozen=True)
class MoEWeights:
    """A mixture of experts with a shared expert. The router works in fp32."""

    router: torch.Tensor  # fp32 [E, hidden]
    correction_bias: torch.Tensor  # fp32 [E]
    gate_up_proj: torch.Tensor  # [E, 2 * moe_intermediate, hidden]
    down_proj: torch.Tensor  # [E, hidden, moe_intermediate]
    shared: MLPWeights


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: torch.Tensor
    attention: AttentionWeights
    post_attention_norm: torch.Tensor
    mlp: MLPWeights | MoEWeights


@dataclass(frozen=True)
class ModelWeights:
    """The whole model."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: torch.Tensor  # [vocab, hidden]


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> ModelWeights:
    """Load a safetensors directory in `dtype` into host memory, or that of `device`.

    Block-fp8 weights are dequantised there.

    Multi-token-prediction layers lie behind the last layer and are skipped by name. Raises
    CheckpointError on a tensor that is missing, has another shape or is unknown.
    """
    checkpoint = Checkpoint(directory)
    known = checkpoint.check(tensor_shapes(config), block_fp8=config.block_fp8)
    unknown = sorted(n for n in checkpoint.names - known if not _ignored(n, config))
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {len(unknown)} tensor(s) that {config.model_type} does not use",
            value=f"{', '.join(unknown[:3])} in {directory}",
            change="check that config.json belongs to these weights",
        )
    return WeightLoader(checkpoint, config, dtype, device or torch.device("cpu")).model()


def _ignored(name: str, config: ModelConfig) -> bool:
    if name.endswith("rotary_emb.inv_freq"):
        return True
    match = re.match(r"model\.layers\.(\d+)\.", name)
    extra = int(match[1]) - config.num_hidden_layers if match else -1
    return 0 <= extra < config.num_nextn_predict_layers


class TensorSource(Protocol):
    """What tensors come from by name: a `Checkpoint`, or what makes them up."""

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor: ...


class WeightLoader:
    """Puts a model's named tensors where the model wants them."""

    def __init__(
        self, source: TensorSource, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._source, self._config = source, config
        self._dtype, self._device = dtype, device

    def model(self) -> ModelWeights:
        """All of it."""
        return ModelWeights(
            embedding=self._get("model.embed_tokens.weight"),
            layers=tuple(self._layer(index) for index in range(self._config.num_hidden_layers)),
            final_norm=self._get("model.norm.weight"),
            lm_head=self._get("lm_head.weight"),
        )

    def _get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._source.tensor(name, dtype or self._dtype, self._device)

    def _layer(self, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        mlp = f"{prefix}mlp."
        sparse = self._config.sparse_mlp_layers[index]
        return LayerWeights(
            input_norm=self._get(f"{prefix}input_layernorm.weight"),
            attention=self._attention(
                f"{prefix}self_attn.", self._config.full_indexer_layers[index]
            ),
            post_attention_norm=self._get(f"{prefix}post_attention_layernorm.weight"),
            mlp=self._moe(mlp) if sparse else self._mlp(mlp),
        )

    def _attention(self, prefix: str, has_indexer: bool) -> AttentionWeights:
        config = self._config
        nope, value = config.qk_nope_head_dim, config.v_head_dim
        kv_b = self._get(f"{prefix}kv_b_proj.weight")
        kv_b = kv_b.view(config.num_attention_heads, nope + value, config.kv_lora_rank)
        return AttentionWeights(
            q_a_proj=self._get(f"{prefix}q_a_proj.weight"),
            q_a_norm=self._get(f"{prefix}q_a_layernorm.weight"),
            q_b_proj=self._get(f"{prefix}q_b_proj.weight"),
            kv_a_proj=self._get(f"{prefix}kv_a_proj_with_mqa.weight"),
            kv_a_norm=self._get(f"{prefix}kv_a_layernorm.weight"),
            key_up=kv_b[:, :nope],
            value_up=kv_b[:, nope:],
            o_proj=self._get(f"{prefix}o_proj.weight"),
            indexer=self._indexer(f"{prefix}indexer.") if has_indexer else None,
        )

    def _indexer(self, prefix: str) -> IndexerWeights:
        return IndexerWeights(
            q_proj=self._get(f"{prefix}wq_b.weight"),
            k_proj=self._get(f"{prefix}wk.weight"),
            k_norm_weight=self._get(f"{prefix}k_norm.weight", torch.float32),
            k_norm_bias=self._get(f"{prefix}k_norm.bias", torch.float32),
            head_proj=self._get(f"{prefix}weights_proj.weight", torch.float32),
        )

    def _mlp(self, prefix: str) -> MLPWeights:
        gate, up = self._get(f"{prefix}gate_proj.weight"), self._get(f"{prefix}up_proj.weight")
        return MLPWeights(torch.cat([gate, up]), self._get(f"{prefix}down_proj.weight"))

    def _moe(self, prefix: str) -> MoEWeights:
        config = self._config
        experts, width, hidden = (
            config.n_routed_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        )
        dtype, device = self._dtype, self._device
        gate_up = torch.empty(experts, 2 * width, hidden, dtype=dtype, device=device)
        down = torch.empty(experts, hidden, width, dtype=dtype, device=device)
        for expert in range(experts):
            one = self._mlp(f"{prefix}experts.{expert}.")
            gate_up[expert], down[expert] = one.gate_up_proj, one.down_proj
        return MoEWeights(
            router=self._get(f"{prefix}gate.weight", torch.float32),
            correction_bias=self._get(f"{prefix}gate.e_score_correction_bias", torch.float32),
            gate_up_proj=gate_up,
            down_proj=down,
            shared=self._mlp(f"{prefix}shared_experts."),
        )

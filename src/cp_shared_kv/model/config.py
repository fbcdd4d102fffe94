"""What a model is, read from the config.json of a Hugging Face checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cp_shared_kv.errors import CheckpointError
from cp_shared_kv.model.architectures import RopeStyle, architecture
from cp_shared_kv.model.fp8_weights import is_block_fp8
from cp_shared_kv.model.indexer_sharing import full_indexer_layers
from cp_shared_kv.model.json_fields import MAX_INTEGER, boolean, integer, number, refuse
from cp_shared_kv.model.regular_file import check_regular_file
from cp_shared_kv.model.rope_parameters import RopeParameters, rope_parameters


@dataclass(frozen=True)
class ModelConfig:
    """The shape and semantics of one DSA transformer. Field names follow config.json.

    `sparse_mlp_layers` says per layer whether its MLP is a mixture of experts; attention is
    sparse in every layer. `full_indexer_layers` says per layer whether it has an indexer; a layer
    without attends to what the last one with it selected. `block_fp8` says that matrices of the
    checkpoint may be e4m3 with scales. `context_length` is the longest request in tokens, answer
    included. `checkpoint_dtype` is config.json's name for the type of the weights, None where it
    has none.
    """

    model_type: str
    checkpoint_dtype: str | None
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_rope_style: RopeStyle
    full_indexer_layers: tuple[bool, ...]
    intermediate_size: int
    moe_intermediate_size: int
    sparse_mlp_layers: tuple[bool, ...]
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope: RopeParameters
    block_fp8: bool
    context_length: int
    eos_token_ids: tuple[int, ...]

    @property
    def softmax_scale(self) -> float:
        """MLA's scale: the full query width to the power -1/2, times YaRN's multiplier."""
        width = self.qk_nope_head_dim + self.qk_rope_head_dim
        return width**-0.5 * self.rope.softmax_multiplier

    @property
    def index_layers(self) -> tuple[int, ...]:
        """The layers that have an indexer and so store index keys, ascending."""
        return tuple(layer for layer, full in enumerate(self.full_indexer_layers) if full)

    @classmethod
    def from_directory(cls, directory: Path | str) -> ModelConfig:
        """Read config.json, and generation_config.json where it names the end tokens.

        Raises CheckpointError when the directory or the file is missing or is not JSON, and
        ConfigError, with the value and what is allowed, for a model this package cannot run.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise CheckpointError(
                "no such model directory",
                value=directory,
                change=_NEEDED + (_FROM_A_HUB if _HUB_NAME.fullmatch(str(directory)) else ""),
            )
        config = _read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        return cls.from_dict(config, _read_json(generation) if generation.exists() else {})

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """The config of a parsed config.json, and generation_config.json where there is one.

        Raises ConfigError as `from_directory` does.
        """
        model_type, found = architecture(config)
        sizes = {name: integer(config, name, most=_MOST.get(name, MAX_INTEGER)) for name in _SIZES}
        layers = sizes["num_hidden_layers"]
        parsed = cls(
            model_type=model_type,
            checkpoint_dtype=_checkpoint_dtype(config),
            **sizes,
            num_nextn_predict_layers=integer(config, "num_nextn_predict_layers", 1, least=0),
            n_shared_experts=integer(config, "n_shared_experts", 1),
            n_group=integer(config, "n_group", 1),
            topk_group=integer(config, "topk_group", 1),
            norm_topk_prob=boolean(config, "norm_topk_prob", True),
            index_rope_style=found.index_rope_style,
            full_indexer_layers=full_indexer_layers(
                config, layers, may_share=found.shares_selections
            ),
            sparse_mlp_layers=_sparse_mlp_layers(config, layers),
            routed_scaling_factor=number(config, "routed_scaling_factor", 1.0),
            rms_norm_eps=number(config, "rms_norm_eps", found.rms_norm_eps),
            rope=rope_parameters(config),
            block_fp8=is_block_fp8(config),
            context_length=integer(config, "max_position_embeddings"),
            eos_token_ids=_end_tokens(config, generation or {}),
        )
        _check_consistent(parsed)
        return parsed


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
)

# Loops go over them, layer by layer and expert by expert.
_MOST = {"num_hidden_layers": 4096, "n_routed_experts": 4096}

_NEEDED = "give --model-path a directory with config.json and *.safetensors"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_FROM_A_HUB = (
    "; names of Hugging Face's hub are not downloaded here, but by hf download NAME --local-dir "
    "DIRECTORY (pip install huggingface_hub)"
)


def _read_json(path: Path) -> dict[str, Any]:
    check_regular_file(path)
    try:
        parsed = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path.name}", value=f"{path} ({error.strerror})", change=_NEEDED
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not JSON", value=f"{path} ({error})") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path.name} is not a JSON object", value=path)
    return parsed


def _check_consistent(config: ModelConfig) -> None:
    def require(holds: bool, what: str, value: object, allowed: str) -> None:
        if not holds:
            raise refuse(what, value, allowed)

    rope = config.qk_rope_head_dim
    require(rope % 2 == 0, "qk_rope_head_dim", rope, "an even number")
    index = config.index_head_dim
    require(index >= rope, "index_head_dim", index, f"at least qk_rope_head_dim ({rope})")
    vocab, ends = config.vocab_size, config.eos_token_ids
    require(max(ends, default=0) < vocab, "eos_token_id", ends, f"below vocab_size ({vocab})")
    if not any(config.sparse_mlp_layers):
        return
    experts, groups, chosen = config.n_routed_experts, config.n_group, config.topk_group
    require(
        experts % groups == 0 and experts >= 2 * groups,
        "n_group",
        groups,
        f"a divisor of n_routed_experts ({experts}) that leaves a group two experts or more",
    )
    require(chosen <= groups, "topk_group", chosen, f"at most n_group ({groups})")
    reachable = experts // groups * chosen
    require(
        config.num_experts_per_tok <= reachable,
        "num_experts_per_tok",
        config.num_experts_per_tok,
        f"at most the {reachable} experts of topk_group groups",
    )


def _sparse_mlp_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    types = config.get("mlp_layer_types")
    if types is None:
        dense = integer(config, "first_k_dense_replace", least=0)
        return tuple(layer >= dense for layer in range(layers))
    kinds = ("dense", "sparse")
    if not isinstance(types, list) or len(types) != layers or any(t not in kinds for t in types):
        raise refuse("mlp_layer_types", types, f"a list of {layers}, each dense or sparse")
    return tuple(kind == "sparse" for kind in types)


def _checkpoint_dtype(config: Mapping[str, Any]) -> str | None:
    value = config.get("dtype")
    if value is None:
        value = config.get("torch_dtype")  # its name before transformers 5
    if value is not None and not isinstance(value, str):
        raise refuse("dtype", value, "the name of a type, such as bfloat16")
    return value


def _end_tokens(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    value, file = generation.get("eos_token_id"), "generation_config.json"
    if value is None:
        value, file = config.get("eos_token_id"), "config.json"
    ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        whole = isinstance(token, int) and not isinstance(token, bool)
        if not whole or not 0 <= token <= MAX_INTEGER:
            raise refuse("eos_token_id", value, "a token id, or a list of them", file)
    return tuple(ids)

"""Tiny seeded checkpoints: whole Hugging Face model directories, made without transformers."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.tensor_shapes import tensor_shapes
from cp_shared_kv.testing.block_fp8 import BLOCK_FP8_CONFIG, block_fp8
from cp_shared_kv.testing.byte_tokenizer import END_TOKEN, VOCABULARY, byte_tokenizer

_CHECKSUMS = "checksums.json"
# Raise it with any change of what is written, so that no older cached directory is taken.
_DEMO_VERSION = 2
_DEMO_SEED = 0
_CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]\n{{ message.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


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


def make_tiny_checkpoint(directory: Path, shape: ModelShape, seed: int) -> None:
    """Write a whole model directory; it appears under its name complete or not at all.

    No tensor has a value that would hide a mistake: norms are not 1, biases not 0. The same seed
    gives the same tensors. An existing directory is replaced.
    """
    config = shape.config()
    tensors = _draw(ModelConfig.from_dict(config), seed, shape.branch_scale)
    if shape.block_fp8:
        tensors = block_fp8(tensors)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as made:
        making = Path(made) / "model"
        making.mkdir()
        save_file(tensors, making / "model.safetensors", metadata={"format": "pt"})
        _write_json(making / "config.json", config)
        end = VOCABULARY[END_TOKEN]
        _write_json(making / "generation_config.json", {"eos_token_id": end, "do_sample": False})
        byte_tokenizer().save(str(making / "tokenizer.json"))
        _write_json(
            making / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END_TOKEN,
                "chat_template": _CHAT_TEMPLATE,
                "model_max_length": shape.max_position_embeddings,
                "clean_up_tokenization_spaces": False,
            },
        )
        _write_json(making / _CHECKSUMS, _checksums(making))
        if directory.exists():
            directory.rename(Path(made) / "replaced")
        making.rename(directory)


def demo_checkpoint_directory() -> Path:
    """The demo model in the user's cache folder, made at first use and again when damaged.

    The folder is $XDG_CACHE_HOME/cp-shared-kv, or ~/.cache/cp-shared-kv. Processes may call this
    at the same time. ConfigError where no file can be kept there.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return _demo_in(cache / "cp-shared-kv")
    # RuntimeError: a user without a home. SafetensorError: a full disk, among others.
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            "the demo model cannot be kept in the cache folder",
            value=error,
            change="set XDG_CACHE_HOME to a directory that this user can make, or write to",
        ) from error


def _demo_in(cache: Path) -> Path:
    directory = cache / f"demo-deepseek-v32-v{_DEMO_VERSION}-seed{_DEMO_SEED}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{directory.name}.lock").open("w") as lock:
        # Until the file is closed no other process replaces what this one has found whole.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_whole(directory):
            make_tiny_checkpoint(directory, ModelShape(), _DEMO_SEED)
    return directory


def _draw(config: ModelConfig, seed: int, branch_scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in sorted(tensor_shapes(config).items()):
        drawn = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            drawn *= 0.1
        elif name.endswith("k_norm.bias"):
            drawn *= 0.2
        elif "norm" in name:
            drawn = 1 + 0.1 * drawn
        elif "embed_tokens" not in name:
            drawn *= (1.5 if "indexer" in name else 1.0) / math.sqrt(shape[-1])
        if "o_proj" in name or "down_proj" in name:
            drawn *= branch_scale
        tensors[name] = drawn
    return tensors


def _is_whole(directory: Path) -> bool:
    try:
        written = json.loads((directory / _CHECKSUMS).read_bytes())
        return written == _checksums(directory)
    except (OSError, ValueError):
        return False


def _checksums(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.iterdir() if path.name != _CHECKSUMS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

"""Tiny seeded checkpoints: whole Hugging Face model directories, made without transformers."""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cp_shared_kv.demo_model.block_fp8 import block_fp8
from cp_shared_kv.demo_model.byte_tokenizer import END_TOKEN, VOCABULARY, byte_tokenizer
from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.tensor_shapes import tensor_shapes

_CHECKSUMS = "checksums.json"
_CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]\n{{ message.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


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


def is_whole(directory: Path) -> bool:
    """Whether a checkpoint made here is there, with every byte that was written."""
    try:
        written = json.loads((directory / _CHECKSUMS).read_bytes())
        return written == _checksums(directory)
    except (OSError, ValueError):
        return False


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


def _checksums(directory: Path) -> dict[str, str]:
    files = sorted(path for path in directory.iterdir() if path.name != _CHECKSUMS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

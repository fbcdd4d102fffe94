"""What the rest of the engine must know of a model, without loading its weights."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.config_values import Dtype, KVCacheDtype
from cp_shared_kv.engine.page_format_names import format_names
from cp_shared_kv.engine.run_spec import PageLayout
from cp_shared_kv.errors import CheckpointError, ConfigError
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPoolSpec
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.ops.choice import check_choice, ops_for
from cp_shared_kv.model.regular_file import check_regular_file
from cp_shared_kv.model.transformer import Transformer

HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100 * 2**20

logger = logging.getLogger("cp_shared_kv")


@dataclass(frozen=True)
class ModelDescription:
    """The model's config, its page layout, and a fingerprint for the handshake."""

    config: ModelConfig
    pool_spec: KVPoolSpec
    fingerprint: str
    compute_dtype: torch.dtype

    @property
    def context_length(self) -> int:
        """Most token positions that the model was made for."""
        return self.config.context_length

    @property
    def page_layout(self) -> PageLayout:
        """What the handshake compares."""
        spec = self.pool_spec
        return PageLayout(
            latent_format=spec.latent.fingerprint,
            index_format=spec.index.fingerprint,
            num_layers=spec.num_layers,
            index_layers=spec.index_layers,
            bytes_per_page=spec.bytes_per_page,
        )


def describe_model(config: EngineConfig) -> ModelDescription:
    """Read a checkpoint's config and headers. Raises `ConfigError` or `CheckpointError`."""
    model = ModelConfig.from_directory(config.model_path)
    dtype = compute_dtype(config.dtype, model.checkpoint_dtype)
    if (config.kv_scratch_tokens or model.index_topk) < model.index_topk:
        raise ConfigError(
            "--kv-scratch-tokens holds less than one token of this model may select",
            value=config.kv_scratch_tokens,
            allowed=f"at least {model.index_topk} (index_topk)",
        )
    check_choice(config.attention_ops, dtype, model)
    return ModelDescription(
        config=model,
        pool_spec=pool_spec(model, config.page_size, config.kv_cache_dtype, dtype),
        fingerprint=_fingerprint(config.model_path),
        compute_dtype=dtype,
    )


def load_transformer(
    config: EngineConfig, model: ModelDescription, device: torch.device
) -> tuple[Transformer, str]:
    """The model with its weights on a device, and what its attention is computed by, which the log
    says, too."""
    name, ops = ops_for(config.attention_ops, device, model.compute_dtype, model.config)
    logger.info("attention by %s on %s", name, device.type)
    return Transformer.load(config.model_path, model.compute_dtype, ops, device), name


def compute_dtype(chosen: Dtype, checkpoint_dtype: str | None) -> torch.dtype:
    """The type to compute in: what was chosen, else the checkpoint's, fp32 where it names none.

    float16 weights are computed in bfloat16, which is as small and has the range of fp32.
    """
    name = (checkpoint_dtype or "float32") if chosen == "auto" else chosen
    return torch.bfloat16 if name in ("bfloat16", "float16") else torch.float32


def pool_spec(
    model: ModelConfig, page_size: int, kv_cache_dtype: KVCacheDtype, dtype: torch.dtype
) -> KVPoolSpec:
    """The page formats of a model that computes in `dtype`.

    Raises ConfigError for fp8 where the model's widths do not suit it.
    """
    latent, index = format_names(
        model.index_head_dim, kv_cache_dtype, computes_in_bf16=dtype == torch.bfloat16
    )
    return KVPoolSpec(
        latent=latent_format(
            latent,
            kv_lora_rank=model.kv_lora_rank,
            qk_rope_head_dim=model.qk_rope_head_dim,
            page_size=page_size,
        ),
        index=index_format(
            index,
            index_head_dim=model.index_head_dim,
            page_size=page_size,
            rope_style=model.index_rope_style,
            rope_pairing=model.index_rope_style,
        ),
        num_layers=model.num_hidden_layers,
        index_layers=model.index_layers,
    )


def _fingerprint(directory: Path) -> str:
    """Hash of config.json and of the safetensors headers (names, shapes, types, offsets).

    The weights themselves are not read: at 700 GB that would take longer than loading them.
    """
    try:
        return _hash_headers(directory)
    except OSError as error:
        raise CheckpointError(
            f"cannot read the checkpoint ({error.strerror})", value=error.filename
        ) from error


def _hash_headers(directory: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    config = directory / "config.json"
    check_regular_file(config)
    digest.update(config.read_bytes())
    for file in sorted(directory.glob("*.safetensors")):
        check_regular_file(file)
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(HEADER_LENGTH_BYTES), "little")
            digest.update(handle.read(min(length, MAX_HEADER_BYTES)))
    return digest.hexdigest()

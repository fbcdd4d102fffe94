"""Block-fp8 checkpoints: e4m3 weights, one fp32 scale for each block of 128 x 128 (DeepSeek-V3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cp_shared_kv.model.json_fields import refuse

if TYPE_CHECKING:
    import torch

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
"""Of the scales' name, after the weight's. Despite it they multiply."""

_ALLOWED: dict[str, tuple[object, ...]] = {
    "quant_method": ("fp8",),
    "weight_block_size": ([BLOCK, BLOCK],),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
}


def is_block_fp8(config: Mapping[str, Any]) -> bool:
    """Does the checkpoint of this config.json hold block-fp8 weights?

    Which of its weights are fp8 the tensors say themselves. Raises ConfigError, with what is
    allowed, for a `quantization_config` of any other kind.
    """
    settings = config.get("quantization_config")
    if not settings:
        return False
    if not isinstance(settings, Mapping):
        raise refuse("quantization_config", settings, "an object, or none")
    for field, allowed in _ALLOWED.items():
        if settings.get(field) not in allowed:
            raise refuse(
                f"quantization_config.{field}",
                settings.get(field),
                f"{allowed[0]!r}: block fp8, or no quantization_config and tensors in fp32, bf16, "
                "fp16 (dequantise the checkpoint first)",
            )
    return True


def scale_shape(weight_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight: one for each block, cut blocks included."""
    return tuple(-(-size // BLOCK) for size in weight_shape)


def dequantised(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight e4m3 [N, K] times scale fp32 [ceil(N/128), ceil(K/128)], rounded once, to `dtype`.

    The blocks at the lower and the right edge may be cut.
    """
    rows, columns = weight.shape
    wide = weight.float()
    by_row = scale.repeat_interleave(BLOCK, dim=0)[:rows]
    wide *= by_row.repeat_interleave(BLOCK, dim=1)[:, :columns]
    return wide.to(dtype)

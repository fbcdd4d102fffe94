"""Weights as production checkpoints have them: e4m3 in blocks of 128 x 128, with fp32 scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

BLOCK_FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
"""The quantization_config of such a checkpoint."""

_LARGEST_E4M3 = 448.0
_QUANTISED = ("_proj.weight", "kv_a_proj_with_mqa.weight", "wq_b.weight", "wk.weight")
_KEPT = ("indexer.weights_proj.weight",)


def block_fp8(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, those quantised that DeepSeek's and GLM's have quantised.

    Norms, router, embedding, output head and the indexer's head weights stay as they are.
    """
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_QUANTISED) and not name.endswith(_KEPT):
            stored[name], stored[f"{name}_scale_inv"] = quantised(tensor)
        else:
            stored[name] = tensor
    return stored


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [N, K] to e4m3 [N, K] and scales fp32 [ceil(N/128), ceil(K/128)].

    A block's scale takes its largest value to the largest of e4m3.
    """
    rows, columns = weight.shape
    whole = functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    blocks = whole.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / _LARGEST_E4M3
    values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    flat = values.flatten(2).flatten(0, 1)
    return flat[:rows, :columns].contiguous(), scale

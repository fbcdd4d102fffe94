"""Which implementation of sparse attention a model runs with: chosen at start, named in the log."""

from __future__ import annotations

import torch

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.ops.gpu import gpu_ops
from cp_shared_kv.model.ops.hopper import hopper_ops, lacking_for
from cp_shared_kv.model.ops.interface import AttentionOps
from cp_shared_kv.model.ops.names import AttentionOpsName
from cp_shared_kv.model.ops.reference import REFERENCE_OPS

_TRITON = "Triton kernels in bf16"


def check_choice(choice: AttentionOpsName, dtype: torch.dtype, model: ModelConfig) -> None:
    """ConfigError for what cannot run, as far as one can tell without a GPU."""
    if choice in ("triton", "hopper") and dtype != torch.bfloat16:
        raise ConfigError(
            f"--attention-ops {choice} computes in bfloat16, and the model in",
            value=str(dtype).removeprefix("torch."),
            change="add --dtype bfloat16, or use --attention-ops auto",
        )
    if choice == "hopper" and (lacking := lacking_for(model)):
        raise _not_available(lacking)


def ops_for(
    choice: AttentionOpsName, device: torch.device, dtype: torch.dtype, model: ModelConfig
) -> tuple[str, AttentionOps]:
    """What a model computes attention with, and how a log names it.

    `auto` takes the best that runs here; any other choice runs or raises ConfigError.
    """
    check_choice(choice, dtype, model)
    on_gpu = device.type == "cuda" and dtype == torch.bfloat16
    if choice == "torch" or (choice == "auto" and not on_gpu):
        return f"plain torch in {str(dtype).removeprefix('torch.')}", REFERENCE_OPS
    if choice == "triton":
        return _TRITON, gpu_ops(model, device)
    found = hopper_ops(model, device)
    if choice == "hopper" and found.lacking:
        raise _not_available(found.lacking)
    name = ", ".join([*found.used, f"{_TRITON} for the rest" if found.used else _TRITON])
    return f"{name} ({'; '.join(found.lacking)})" if found.lacking else name, found.ops


def _not_available(lacking: list[str] | tuple[str, ...]) -> ConfigError:
    return ConfigError(
        "--attention-ops hopper cannot run here",
        value="; ".join(lacking),
        change="install SGLang's kernels on a Hopper GPU, or use --attention-ops auto",
    )

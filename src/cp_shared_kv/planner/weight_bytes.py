"""What a rank's share of the weights takes, from the shapes of the checkpoint's tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.fp8_weights import BLOCK, scale_shape
from cp_shared_kv.model.tensor_shapes import tensor_shapes

WeightDtype = Literal["auto", "fp8", "bf16"]

# Never quantised in published block-fp8 checkpoints, beside whatever is no matrix.
_NOT_FP8 = (
    "embed_tokens.weight",
    "lm_head.weight",
    "mlp.gate.weight",
    "indexer.weights_proj.weight",
)


@dataclass(frozen=True, slots=True)
class WeightSplit:
    """Over how many ranks the weights of each kind are divided evenly.

    Everything but the routed experts is whole on every context-parallel rank, unless attention
    is tensor-parallel within it.
    """

    expert_ranks: int
    dense_ranks: int = 1

    def __post_init__(self) -> None:
        for what, ranks in (
            ("--expert-parallel-size", self.expert_ranks),
            ("--attention-tensor-parallel-size", self.dense_ranks),
        ):
            if ranks < 1:
                raise ConfigError(f"{what} is out of range", value=ranks, allowed="1 or more")


def check_expert_ranks(ranks: int, experts: int) -> None:
    """Refuse with ConfigError what does not spread the routed experts evenly."""
    divisors = [number for number in range(1, experts + 1) if experts % number == 0]
    if ranks not in divisors:
        raise ConfigError(
            f"--expert-parallel-size does not divide the {experts} routed experts",
            value=ranks,
            allowed=", ".join(map(str, divisors)),
        )


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes and parameters of a model without its multi-token-prediction layers."""

    parameters: int
    routed_expert_bytes: int
    other_bytes: int

    @property
    def in_bf16(self) -> bool:
        """Whether no weight takes less than bf16 does."""
        return self.routed_expert_bytes + self.other_bytes >= 2 * self.parameters

    def of_rank(self, split: WeightSplit) -> int:
        """Bytes on one rank."""
        return -(-self.routed_expert_bytes // split.expert_ranks) + -(
            -self.other_bytes // split.dense_ranks
        )


def weight_bytes(model: ModelConfig, dtype: WeightDtype = "auto") -> WeightBytes:
    """All weights of a model; `auto` is what its config.json says, fp8 in blocks or bf16."""
    fp8 = model.block_fp8 if dtype == "auto" else dtype == "fp8"
    parameters, experts, others = 0, 0, 0
    for name, shape in tensor_shapes(model).items():
        size = math.prod(shape)
        nbytes = _fp8_bytes(shape) if fp8 and _may_be_fp8(name, shape) else 2 * size
        parameters += size
        if ".mlp.experts." in name:
            experts += nbytes
        else:
            others += nbytes
    return WeightBytes(parameters, experts, others)


def _may_be_fp8(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and min(shape) >= BLOCK and not name.endswith(_NOT_FP8)


def _fp8_bytes(shape: tuple[int, ...]) -> int:
    return math.prod(shape) + 4 * math.prod(scale_shape(shape))

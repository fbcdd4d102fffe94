"""The ways to compute sparse attention that a user can choose from. Without torch."""

from typing import Literal

AttentionOpsName = Literal["auto", "torch", "triton", "hopper"]

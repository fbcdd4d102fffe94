"""Ranks that would compute attention differently do not start."""

from __future__ import annotations

import hashlib

import pytest
import torch

from cp_shared_kv.engine.same_ops import require_same_ops
from cp_shared_kv.errors import StartupError


class Told:
    """A group of two in which the other rank has told its ops."""

    cp_rank, cp_size = 0, 2

    def __init__(self, other: str) -> None:
        self._other = hashlib.sha256(other.encode()).digest()

    def all_gather_bytes(self, local: torch.Tensor, out: torch.Tensor) -> None:
        out[0].copy_(local)
        out[1].copy_(torch.frombuffer(bytearray(self._other), dtype=torch.uint8))

    def barrier(self) -> None:
        raise AssertionError


def test_the_same_on_both() -> None:
    require_same_ops(Told("DeepGEMM, FlashMLA"), "DeepGEMM, FlashMLA")


def test_what_differs_is_named_with_what_to_do() -> None:
    with pytest.raises(StartupError, match=r"different ways: here by Triton.*--attention-ops"):
        require_same_ops(Told("DeepGEMM, FlashMLA"), "Triton")

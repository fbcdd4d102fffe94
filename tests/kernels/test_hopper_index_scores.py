"""What DeepGEMM is given: queries in e4m3, their scales in the head weights, keys as stored."""

from __future__ import annotations

import pytest
import torch

from cp_shared_kv.memory.formats.registry import index_format
from cp_shared_kv.model.ops import hopper, reference


def fp8_mqa_logits(
    q: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    clean_logits: bool,
) -> torch.Tensor:
    """DeepGEMM's function in torch."""
    codes, scales = keys
    assert q.dtype == codes.dtype == torch.float8_e4m3fn
    assert starts.dtype == ends.dtype == torch.int32
    assert not starts.any()
    assert (ends == len(codes)).all()
    assert not clean_logits
    return reference.index_scores(q.float(), weights, codes.float()) * scales


FEW = 4
"""Queries from which on they go to DeepGEMM: fewer than in earnest, for the interpreter."""


@pytest.mark.parametrize("rows", [1, FEW - 1, FEW])
def test_scores_are_those_of_the_decoded_keys_to_the_precision_of_the_queries(
    device: torch.device, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "LEAST_QUERIES", FEW)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(rows, 32, 128, generator=generator).bfloat16()
    weights = torch.randn(len(q), 32, generator=generator)
    stored = index_format("fp8_scaled", index_head_dim=128, page_size=64)
    keys = stored.encode(torch.randn(150, 128, generator=generator))
    quantised = stored.quantised(keys)
    assert quantised is not None
    codes, scales = (part.to(device) for part in quantised)
    got = hopper.index_scores_fp8(fp8_mqa_logits, q.to(device), weights.to(device), codes, scales)
    expected = reference.index_scores(q, weights, stored.decode(keys, torch.float32))
    error = (got.cpu() - expected).norm() / expected.norm()
    assert 0 < error < 0.03
    few, many = (
        hopper.index_scores_fp8(
            fp8_mqa_logits, q.repeat(FEW, 1, 1)[part].to(device),
            weights.repeat(FEW, 1)[part].to(device), codes, scales,
        )[:1]
        for part in (slice(0, 1), slice(0, FEW))
    )  # fmt: skip
    # Tensor cores sum products of e4m3 in about 14 bits; the stand-in for DeepGEMM does not.
    accuracy = (
        {"atol": 5e-2, "rtol": 1e-2} if device.type == "cuda" else {"atol": 2e-4, "rtol": 1e-5}
    )
    torch.testing.assert_close(few, many, **accuracy)

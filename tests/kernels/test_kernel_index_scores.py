"""The indexer's scores by kernel against the reference, which multiplies in fp32."""

from __future__ import annotations

import pytest
import torch

from cp_shared_kv.model.ops import reference


@pytest.mark.parametrize(("rows", "heads", "width", "keys"), [
    (1, 8, 32, 1), (19, 64, 128, 300), (16, 5, 16, 128), (33, 8, 64, 257),
])  # fmt: skip
def test_scores_are_the_references(
    device: torch.device, rows: int, heads: int, width: int, keys: int
) -> None:
    from cp_shared_kv.kernels.index_scores import index_scores

    generator = torch.Generator().manual_seed(rows * keys)
    # Triton's interpreter has no bf16 product; on a GPU the inputs are bf16, exact in fp32 too.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(rows, heads, width, generator=generator).to(dtype)
    k = torch.randn(keys, width, generator=generator).to(dtype)
    weights = torch.randn(rows, heads, generator=generator)
    expected = reference.index_scores(q, weights, k)
    got = index_scores(q.to(device), weights.to(device), k.to(device))
    torch.testing.assert_close(got.cpu(), expected, atol=2e-4, rtol=1e-5)
    again = index_scores(q.to(device), weights.to(device), k.to(device))
    assert torch.equal(again, got)


def test_cut_keys_have_the_scores_of_the_whole(device: torch.device) -> None:
    from cp_shared_kv.kernels.index_scores import index_scores

    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(3, 16, 32, generator=generator).to(device, dtype)
    keys = torch.randn(1500, 32, generator=generator).to(device, dtype)
    weights = torch.randn(3, 16, generator=generator).to(device)
    whole = index_scores(q, weights, keys)
    for part in (slice(0, 1024), slice(1024, 1500), slice(0, 1300)):
        assert torch.equal(index_scores(q, weights, keys[part].clone()), whole[:, part])
    # Without a GPU it is a CPU's matrix product, whose bits depend on which column of two it is.
    for row in (1, 2) if device.type == "cuda" else (2,):
        alone = slice(row, row + 1)
        assert torch.equal(index_scores(q[alone], weights[alone], keys), whole[alone])

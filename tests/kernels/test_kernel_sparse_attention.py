"""Attention to selected rows by kernel against the reference on gathered rows."""

from __future__ import annotations

import pytest
import torch

from cp_shared_kv.model.ops import reference


@pytest.mark.parametrize(("tokens", "heads", "latent", "rope", "chosen"), [
    (3, 4, 64, 16, 1), (2, 128, 512, 64, 70), (5, 20, 32, 16, 33), (1, 16, 128, 32, 96),
])  # fmt: skip
def test_attention_is_the_references(
    device: torch.device, tokens: int, heads: int, latent: int, rope: int, chosen: int
) -> None:
    from cp_shared_kv.kernels.sparse_attention import sparse_attention

    generator = torch.Generator().manual_seed(chosen)
    # Triton's interpreter has no bf16 product; on a GPU the inputs are bf16, exact in fp32 too.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # By heads first, as the absorbed queries come out of their product.
    q_latent = torch.randn(heads, tokens, latent, generator=generator).to(dtype).transpose(0, 1)
    q_pe = torch.randn(tokens, heads, rope, generator=generator).to(dtype)
    rows = torch.randn(chosen + 50, latent + rope, generator=generator).to(dtype)
    rows[7] = float("nan")  # nobody selects it
    free = torch.tensor([row for row in range(len(rows)) if row != 7])
    slots = torch.stack(
        [free[torch.randperm(len(free), generator=generator)[:chosen]] for _ in range(tokens)]
    )
    slots[0, chosen // 2 + 1 :] = -1
    scale = latent**-0.5
    valid = slots >= 0
    gathered = rows[torch.where(valid, slots, slots[:, :1])].float()
    expected = reference.sparse_attention(
        q_latent.float(), q_pe.float(), gathered[..., :latent], gathered[..., latent:], valid, scale
    )
    got = sparse_attention(
        q_latent.to(device), q_pe.to(device), rows.to(device), slots.to(device), scale
    )
    accuracy = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.cpu().float(), expected, atol=accuracy, rtol=accuracy)


def test_where_rows_lie_changes_no_bit(device: torch.device) -> None:
    from cp_shared_kv.kernels.sparse_attention import sparse_attention

    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q_latent = torch.randn(3, 16, 64, generator=generator).to(device, dtype)
    q_pe = torch.randn(3, 16, 16, generator=generator).to(device, dtype)
    rows = torch.randn(90, 80, generator=generator).to(device, dtype)
    slots = torch.stack([torch.randperm(90, generator=generator)[:50] for _ in range(3)])
    slots[2, 20:] = -1
    slots = slots.to(device)
    first = sparse_attention(q_latent, q_pe, rows, slots, 0.1)
    order = torch.randperm(90, generator=generator).to(device)
    moved = torch.empty_like(rows)
    moved[order] = rows
    there = torch.where(slots < 0, -1, order[slots.clamp(min=0)])
    padded = torch.nn.functional.pad(there, (0, 40), value=-1)
    for places in (there, padded):
        assert torch.equal(sparse_attention(q_latent, q_pe, moved, places, 0.1), first)
    assert torch.equal(
        sparse_attention(q_latent[1:2], q_pe[1:2], rows, slots[1:2], 0.1), first[1:2]
    )


def test_a_part_of_queries_by_heads_first_writes_its_own_tokens_alone(device: torch.device) -> None:
    from cp_shared_kv.kernels.sparse_attention import sparse_attention

    generator = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    by_heads = torch.randn(16, 6, 64, generator=generator).to(device, dtype)
    q_latent, q_pe = by_heads.transpose(0, 1), torch.randn(6, 16, 16).to(device, dtype)
    rows = torch.randn(90, 80, generator=generator).to(device, dtype)
    slots = torch.randint(90, (6, 40), generator=generator).to(device)
    whole = sparse_attention(q_latent, q_pe, rows, slots, 0.1)
    for part in (slice(0, 2), slice(2, 5), slice(5, 6)):
        attended = sparse_attention(q_latent[part], q_pe[part], rows, slots[part], 0.1)
        assert torch.equal(attended, whole[part])

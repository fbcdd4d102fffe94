"""Rows of fp8_ds_mla decoded by kernel have the bits that the format's own decoding gives."""

from __future__ import annotations

import pytest
import torch

from cp_shared_kv.memory.formats.fp8_ds_mla import Fp8DsMlaFormat
from cp_shared_kv.memory.formats.registry import latent_format
from cp_shared_kv.memory.row_decoder import attendable_rows


def encoded(
    latent: int, rope: int, count: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows u8[count, row_bytes] with codes of every kind, and what they decode to."""
    page_format = latent_format(
        "fp8_ds_mla", kv_lora_rank=latent, qk_rope_head_dim=rope, page_size=64
    )
    generator = torch.Generator().manual_seed(count)
    exponents = torch.randint(-20, 20, (count, latent // 8), generator=generator)
    values = torch.randn(count, latent, generator=generator)
    values *= 2.0 ** exponents.repeat_interleave(8, dim=1)
    k_pe = torch.randn(count, rope, generator=generator)
    rows = page_format.encode(values, k_pe)
    rows[0, :128] = torch.arange(128)
    rows[1, :128] = torch.arange(128, 256)
    expected = torch.cat(page_format.decode(rows, torch.bfloat16), dim=1)
    return rows.to(device), expected


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, but for what a NaN looks like."""
    got = got.cpu()
    assert torch.equal(got.isnan(), expected.isnan())
    bits = [part.nan_to_num(0.0).view(torch.int16) for part in (got, expected)]
    assert torch.equal(*bits)


@pytest.mark.parametrize(
    ("latent", "rope", "count"), [(512, 64, 19), (256, 8, 4), (384, 40, 2), (128, 6, 7)]
)
def test_all_rows(device: torch.device, latent: int, rope: int, count: int) -> None:
    from cp_shared_kv.kernels.decode_rows import decode_fp8_latent

    rows, expected = encoded(latent, rope, count, device)
    assert_same(decode_fp8_latent(rows, None, latent, rope), expected)


def test_chosen_rows_in_any_order_and_more_than_once(device: torch.device) -> None:
    from cp_shared_kv.kernels.decode_rows import decode_fp8_latent

    rows, expected = encoded(512, 64, 30, device)
    slots = torch.tensor([29, 0, 3, -1, 3, 1, -1])
    got = decode_fp8_latent(rows, slots.to(device), 512, 64)
    chosen = slots >= 0
    assert_same(got[chosen.to(device)], expected[slots[chosen]])


@pytest.mark.parametrize("most_rows", [30, 29, 12, 1])
def test_places_name_the_same_rows_however_they_are_decoded(
    device: torch.device, most_rows: int
) -> None:
    rows, expected = encoded(512, 64, 30, device)
    page_format = latent_format("fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=64, page_size=64)
    assert isinstance(page_format, Fp8DsMlaFormat)
    generator = torch.Generator().manual_seed(most_rows)
    places = torch.randint(2, 30, (7, 6), generator=generator)
    places[3, 2:] = -1
    seen = 0
    for part, decoded, there in attendable_rows(
        page_format, rows, places.to(device), most_rows=most_rows
    ):
        assert part.start == seen
        seen = part.stop
        assert torch.equal(there.cpu() < 0, places[part] < 0)
        chosen = there[there >= 0]
        assert_same(decoded[chosen], expected[places[part][places[part] >= 0]])
    assert seen == len(places)


def test_queries_are_quantised_as_keys_are_and_their_scales_weigh_the_heads(
    device: torch.device,
) -> None:
    from cp_shared_kv.kernels.quantise_queries import quantise_queries
    from cp_shared_kv.memory.formats.block_fp8 import quantise

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 7, 128, generator=generator).bfloat16() * 3
    q[2, 3] = 0
    weights = torch.randn(5, 7, generator=generator)
    codes, scales = quantise(q.flatten(0, 1), "fp32")
    got_codes, got_weights = quantise_queries(q.to(device), weights.to(device))
    assert torch.equal(got_codes.cpu(), codes.view(5, 7, 128))
    assert torch.equal(got_weights.cpu(), weights * scales.view(5, 7))

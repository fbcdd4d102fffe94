"""Pages of fp32 and bf16: the values as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_format import IndexFormat, LatentFormat

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
each_type = pytest.mark.parametrize("name", TYPES)


def latent_of(name: str) -> LatentFormat:
    return latent_format(name, kv_lora_rank=4, qk_rope_head_dim=2, page_size=8)


def index_of(name: str) -> IndexFormat:
    return index_format(name, index_head_dim=6, page_size=8)


def any_bits(dtype: torch.dtype) -> torch.Tensor:
    """[5, 6] of any bit patterns, among them -0, NaNs of all kinds, infinity and a subnormal."""
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2**31, (5, 6)))
    if dtype == torch.float32:
        bits[0] = torch.tensor([1 << 31, 0x7FC00001, 0x7F800001, 1, 0xFFFFFFFF, 0x7F800000])
        return bits.to(torch.uint32).view(torch.float32)
    bits[0] = torch.tensor([1 << 15, 0x7FC1, 0x7F81, 1, 0xFFFF, 0x7F80])
    return (bits & 0xFFFF).to(torch.uint16).view(torch.bfloat16)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@each_type
def test_a_row_is_the_values_own_bytes_and_returns_them_all(name: str) -> None:
    dtype = TYPES[name]
    values = any_bits(dtype)
    rows = latent_of(name).encode(values[:, :4], values[:, 4:])
    assert (rows.dtype, bytes_of(rows)) == (torch.uint8, bytes_of(values))
    latent, k_pe = latent_of(name).decode(rows, dtype)
    assert bytes_of(torch.cat((latent, k_pe), 1)) == bytes_of(values)
    rows = index_of(name).encode(values)
    assert (rows.dtype, bytes_of(rows)) == (torch.uint8, bytes_of(values))
    assert bytes_of(index_of(name).decode(rows, dtype)) == bytes_of(values)


@each_type
def test_bf16_values_survive_either_format(name: str) -> None:
    values = torch.randn(3, 6).bfloat16()
    codec = latent_of(name)
    latent, k_pe = codec.decode(codec.encode(values[:, :4], values[:, 4:]), torch.bfloat16)
    assert latent.dtype == k_pe.dtype == torch.bfloat16
    assert torch.equal(torch.cat((latent, k_pe), 1), values)
    keys = index_of(name).decode(index_of(name).encode(values), torch.bfloat16)
    assert torch.equal(keys, values)


def test_fp32_values_are_rounded_to_the_nearest_bf16_and_ties_to_even() -> None:
    step = 2.0**-7  # of bf16 from 1 to 2
    given = [1.0, 1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, -0.0, 2.0**-133]
    rows = index_of("bf16").encode(torch.tensor([given]))
    # By hand, least byte first: 1, 1, 1 + 2 steps, 1 + 1 step, -0, the least subnormal.
    assert rows.tolist() == [
        [*(0x80, 0x3F), *(0x80, 0x3F), *(0x82, 0x3F), *(0x81, 0x3F), *(0x00, 0x80), *(0x01, 0x00)]
    ]


def test_the_bytes_of_a_latent_row_lie_where_the_design_says() -> None:
    codec = latent_format("bf16", kv_lora_rank=512, qk_rope_head_dim=64, page_size=64)
    rows = codec.encode(torch.full((1, 512), 1.5), torch.full((1, 64), -2.0))[0]
    assert len(rows) == 1152
    assert rows[:1024].view(-1, 2).unique(dim=0).tolist() == [[0xC0, 0x3F]]
    assert rows[1024:].view(-1, 2).unique(dim=0).tolist() == [[0x00, 0xC0]]


@each_type
def test_no_tokens_encode_and_decode(name: str) -> None:
    codec = latent_of(name)
    rows = codec.encode(torch.empty(0, 4), torch.empty(0, 2))
    assert rows.shape == (0, codec.row_bytes)
    latent, k_pe = codec.decode(rows, torch.float32)
    assert (latent.shape, k_pe.shape) == ((0, 4), (0, 2))
    assert index_of(name).decode(index_of(name).encode(torch.empty(0, 6)), torch.float32).shape == (
        0,
        6,
    )

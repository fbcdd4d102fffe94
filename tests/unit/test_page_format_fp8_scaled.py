"""The 8,448-byte page of index keys, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.memory.formats.block_fp8 import ScaleKind
from cp_shared_kv.memory.formats.registry import index_format
from cp_shared_kv.memory.page_format import IndexFormat


def codec_of(page_size: int = 64, scale_kind: ScaleKind = "fp32") -> IndexFormat:
    return index_format(
        "fp8_scaled", index_head_dim=128, page_size=page_size, scale_kind=scale_kind
    )


def test_a_page_is_the_keys_of_all_its_tokens_and_then_their_scales() -> None:
    codec = codec_of()
    keys = torch.zeros(3, 128)
    keys[0, 0], keys[0, 127] = 448.0, 1.0  # scale 1
    keys[1, 5], keys[1, 6] = -14.0, -0.0  # scale 2^-5
    rows = codec.encode(keys)  # the third key is all zeros
    pages = torch.full((2, codec.page_bytes), 0xAA, dtype=torch.uint8)
    codec.scatter_rows(pages, torch.tensor([64, 64 + 63, 64 + 1]), rows)

    assert pages.shape == (2, 8448)
    assert (pages[0] == 0xAA).all()
    page = pages[1].numpy()
    assert page[0:128].tolist() == [0x7E, *[0] * 126, 0x38]
    assert page[63 * 128 : 64 * 128].tolist() == [*[0] * 5, 0xFE, 0x80, *[0] * 121]
    assert page[128:256].tolist() == [0] * 128
    assert page[8192:8196].tobytes() == np.float32(1).tobytes()
    assert page[8192 + 4 * 63 : 8448].tobytes() == np.float32(2.0**-5).tobytes()
    assert page[8196:8200].tobytes() == (np.float32(1e-4) / np.float32(448)).tobytes()
    assert (page[256 : 63 * 128] == 0xAA).all()
    assert (page[8200 : 8192 + 4 * 63] == 0xAA).all()

    read = codec.decode(
        codec.gather_rows(pages, torch.tensor([64 + 63, 64, 64 + 1])), torch.float32
    )
    assert read.view(torch.int32).tolist() == keys[[1, 0, 2]].view(torch.int32).tolist()


def test_scales_of_powers_of_two() -> None:
    keys = torch.zeros(2, 128)
    keys[0, 0], keys[1, 0] = 449.0, 1.0
    rows = codec_of(scale_kind="power-of-two").encode(keys)
    assert rows[0, [0, *range(128, 132)]].tolist() == [0x76, 0x00, 0x00, 0x00, 0x40]
    assert rows[1, [0, *range(128, 132)]].tolist() == [0x78, 0x00, 0x00, 0x80, 0x3B]  # 256 / 2^8


@pytest.mark.parametrize("page_size", [1, 2, 64])
def test_every_slot_of_every_page_size_returns_its_own_key(page_size: int) -> None:
    codec = codec_of(page_size)
    keys = torch.randn(3 * page_size, 128)
    rows = codec.encode(keys)
    pages = torch.full((4, codec.page_bytes), 0xAA, dtype=torch.uint8)
    slots = torch.randperm(3 * page_size) + page_size
    codec.scatter_rows(pages, slots, rows)
    assert torch.equal(codec.gather_rows(pages, slots), rows)


def test_keys_are_read_in_the_dtype_that_is_asked_for() -> None:
    rows = codec_of().encode(torch.randn(4, 128))
    wide = codec_of().decode(rows, torch.float32)
    assert torch.equal(codec_of().decode(rows, torch.bfloat16), wide.bfloat16())


@pytest.mark.parametrize("index_head_dim", [32, 64, 256])
def test_keys_of_another_width_are_refused(index_head_dim: int) -> None:
    with pytest.raises(ConfigError) as refused:
        index_format("fp8_scaled", index_head_dim=index_head_dim, page_size=64)
    message = str(refused.value)
    assert f"index_head_dim for the page format fp8_scaled: {index_head_dim};" in message
    assert "allowed: 128" in message
    assert "bf16 or fp32" in message


@pytest.mark.parametrize("tokens", [0, 1])
def test_one_token_or_none_has_rows_too(tokens: int) -> None:
    keys = torch.full((tokens, 128), -7.0)
    rows = codec_of().encode(keys)
    assert rows.shape == (tokens, 132)
    assert torch.equal(codec_of().decode(rows, torch.float32), keys)

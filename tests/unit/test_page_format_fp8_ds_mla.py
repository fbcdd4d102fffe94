"""The 656-byte latent row, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.memory.formats.registry import latent_format
from cp_shared_kv.memory.page_format import LatentFormat

FLOOR_SCALE = (np.float32(1e-4) / np.float32(448)).tobytes()


def production(**changes: object) -> LatentFormat:
    widths = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "page_size": 64}
    return latent_format("fp8_ds_mla", **{**widths, **changes})  # type: ignore[arg-type]


def test_a_row_made_by_hand() -> None:
    latent = torch.zeros(1, 512)
    # Largest 448, so the scale is 1 and each value is its own e4m3.
    latent[0, :8] = torch.tensor([448.0, -448.0, 1.0, -0.0, 2.0**-9, 17.0, 19.0, 2.0**-10])
    latent[0, 128] = 4.0  # alone in its block: scale 4 / 448
    latent[0, 256:384] = -7.0  # scale 2^-6
    k_pe = torch.zeros(1, 64)
    k_pe[0, :4] = torch.tensor([1.0, -2.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8])  # the last two are ties
    (row,) = production().encode(latent, k_pe).tolist()

    # 17 lies between 16 and 18, 19 between 18 and 20, 2^-10 between 0 and 2^-9: all to even.
    assert row[:8] == [0x7E, 0xFE, 0x38, 0x80, 0x01, 0x58, 0x5A, 0x00]
    assert row[8:128] == [0x00] * 120
    assert row[128:256] == [0x7E] + [0x00] * 127
    assert row[256:384] == [0xFE] * 128
    assert row[384:512] == [0x00] * 128
    scales = [bytes(row[start : start + 4]) for start in range(512, 528, 4)]
    assert scales == [
        bytes([0x00, 0x00, 0x80, 0x3F]),
        (np.float32(4) / np.float32(448)).tobytes(),
        bytes([0x00, 0x00, 0x80, 0x3C]),
        FLOOR_SCALE,
    ]
    assert row[528:536] == [0x80, 0x3F, 0x00, 0xC0, 0x80, 0x3F, 0x82, 0x3F]
    assert row[536:656] == [0x00] * 120
    assert len(row) == 656


def test_the_same_row_with_scales_of_powers_of_two() -> None:
    latent = torch.zeros(1, 512)
    latent[0, :2] = torch.tensor([449.0, 1.0])  # scale 2: 224.5 is nearest to 224
    latent[0, 128] = 4.0  # scale 2^-6: 256
    (row,) = production(scale_kind="power-of-two").encode(latent, torch.zeros(1, 64)).tolist()
    assert row[:2] == [0x76, 0x30]
    assert row[128] == 0x78
    assert row[512:520] == [0x00, 0x00, 0x00, 0x40, 0x00, 0x00, 0x80, 0x3C]
    assert row[520:528] == [0x00, 0x00, 0x80, 0x34] * 2  # 2^-22 for a block of zeros


def test_a_row_of_zeros_is_zeros_and_no_nan() -> None:
    codec = production()
    row = codec.encode(torch.zeros(1, 512), torch.zeros(1, 64))
    assert bytes(row[0].tolist()) == bytes(512) + 4 * FLOOR_SCALE + bytes(128)
    latent, k_pe = codec.decode(row, torch.float32)
    assert latent.tolist() == [[0.0] * 512]
    assert k_pe.tolist() == [[0.0] * 64]


def test_a_row_is_read_by_its_bytes_alone() -> None:
    row = torch.zeros(1, 656, dtype=torch.uint8)
    row[0, [0, 127, 128, 511]] = torch.tensor([0x38, 0xB8, 0x7E, 0x01], dtype=torch.uint8)
    scales = np.array([3.0, 0.1, 5.0, 2.0**-3], np.float32)  # any fp32 is a scale to a reader
    row[0, 512:528] = torch.from_numpy(scales.view(np.uint8))
    row[0, 654:656] = torch.tensor([0x40, 0xC0], dtype=torch.uint8)
    latent, k_pe = production().decode(row, torch.float32)
    assert latent[0, [0, 127, 511]].tolist() == [3.0, -3.0, 2.0**-12]
    assert latent[0, 128].item() == float(np.float32(448) * np.float32(0.1))
    assert k_pe[0, 62:].tolist() == [0.0, -3.0]
    narrow, _ = production().decode(row, torch.bfloat16)
    assert torch.equal(narrow, latent.bfloat16())


@pytest.mark.parametrize(
    ("kv_lora_rank", "qk_rope_head_dim", "row_bytes"),
    [(128, 8, 148), (256, 8, 280), (1024, 8, 1072), (128, 3, 138)],
)
@pytest.mark.parametrize("tokens", [0, 1, 3])
def test_any_whole_number_of_blocks_makes_a_row(
    kv_lora_rank: int, qk_rope_head_dim: int, row_bytes: int, tokens: int
) -> None:
    codec = production(kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)
    assert codec.row_bytes == row_bytes
    latent, k_pe = torch.randn(tokens, kv_lora_rank), torch.randn(tokens, qk_rope_head_dim)
    rows = codec.encode(latent, k_pe)
    assert rows.shape == (tokens, row_bytes)
    read, read_k_pe = codec.decode(rows, torch.float32)
    assert torch.allclose(read, latent, rtol=2**-4, atol=1e-4)
    assert torch.equal(read_k_pe, k_pe.bfloat16().float())


@pytest.mark.parametrize("kv_lora_rank", [64, 500, 513])
def test_a_latent_that_is_not_whole_blocks_is_refused(kv_lora_rank: int) -> None:
    with pytest.raises(ConfigError) as refused:
        production(kv_lora_rank=kv_lora_rank)
    message = str(refused.value)
    assert f"kv_lora_rank for the page format fp8_ds_mla: {kv_lora_rank};" in message
    assert "allowed: multiples of 128" in message
    assert "bf16 or fp32" in message

"""e4m3 with a scale for each block: every code, every tie, and the scales."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cp_shared_kv.memory.formats.block_fp8 import (
    ScaleKind,
    block_scales,
    dequantise,
    quantise,
    to_e4m3,
)

FLOOR_SCALE = np.float32(1e-4) / np.float32(448)
LARGEST = 0x7E  # 448; 0x7F is NaN


def value_of(code: int) -> float:
    """An e4m3 number by its definition (OCP 8-bit floating point, E4M3)."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 0x80 else magnitude


VALUES = np.array([value_of(code) for code in range(LARGEST + 1)], np.float64)


def nearest_codes(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The code of each value, by looking for it: the nearest one, of two the even one."""
    wide = np.abs(values).astype(np.float64)
    above = np.clip(np.searchsorted(VALUES, wide), 1, LARGEST)
    to_below, to_above = wide - VALUES[above - 1], VALUES[above] - wide
    upwards = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return (np.where(upwards, above, above - 1) + np.signbit(values) * 0x80).astype(np.uint8)


def codes(*values: float) -> list[int]:
    return to_e4m3(torch.tensor(values, dtype=torch.float32)).tolist()


def test_every_code_is_read_as_the_number_that_it_stands_for() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(2, 128)
    read = dequantise(every, torch.ones(2, 1), torch.float32).flatten()
    for code in range(256):
        if code & 0x7F == 0x7F:
            assert read[code].isnan()
        else:
            assert read[code].item() == value_of(code)
            assert bool(read[code].signbit()) == (code >= 0x80)


def test_every_number_of_the_format_gets_its_own_code() -> None:
    assert codes(*VALUES) == list(range(LARGEST + 1))
    assert codes(*-VALUES) == list(range(0x80, 0x80 + LARGEST + 1))  # -0.0 is 0x80


@pytest.mark.parametrize("sign", [0.0, -0.0])
def test_every_tie_goes_to_the_even_code_and_its_neighbours_do_not(sign: float) -> None:
    bit = 0x80 if np.signbit(sign) else 0
    for code in range(LARGEST):
        middle = np.float32((VALUES[code] + VALUES[code + 1]) / 2)  # exact: two bits more
        below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(999))
        even = code + code % 2
        found = codes(*np.copysign([below, middle, above], sign))
        assert found == [bit + code, bit + even, bit + code + 1]


def test_numbers_below_the_least_normal_one_keep_the_step_of_the_subnormals() -> None:
    step = 2.0**-9
    assert codes(step, 1.25 * step, 1.5 * step, 2.5 * step, 7 * step, 8 * step) == [
        *(1, 1, 2, 2, 7, 8),
    ]
    assert codes(0.5 * step, np.nextafter(np.float32(0.5 * step), np.float32(1))) == [0, 1]
    assert codes(-0.5 * step, -0.0, 1e-45, -1e-45) == [0x80, 0x80, 0x00, 0x80]


def test_what_is_too_large_becomes_the_largest_and_not_nan() -> None:
    assert codes(448.0, 449.0, 464.0, 465.0, 1e30, float("inf")) == [LARGEST] * 6
    assert codes(-448.0, -465.0, float("-inf")) == [0x80 + LARGEST] * 3
    assert codes(float("nan"))[0] & 0x7F == 0x7F


@pytest.mark.parametrize("kind", ["fp32", "power-of-two"])
def test_the_scale_makes_the_largest_of_a_block_the_largest_of_the_format(kind: ScaleKind) -> None:
    amax = torch.tensor([448.0, 448.0 * 2.0**10, 448.0 * 2.0**-12])
    assert block_scales(amax, kind).tolist() == [1.0, 2.0**10, 2.0**-12]


def test_a_scale_is_the_quotient_rounded_once() -> None:
    amax = np.random.default_rng(0).lognormal(0, 8, 1000).astype(np.float32)
    expected = np.maximum(amax, np.float32(1e-4)) / np.float32(448)
    scales = block_scales(torch.from_numpy(amax), "fp32")
    assert scales.numpy().tobytes() == expected.tobytes()


def test_a_block_of_almost_nothing_has_the_scale_of_the_floor() -> None:
    amax = torch.tensor([0.0, 1e-45, 5e-5, 1e-4])
    assert block_scales(amax, "fp32").tolist() == [float(FLOOR_SCALE)] * 4
    # 2^-22 is the next power of two above 1e-4 / 448.
    assert block_scales(amax, "power-of-two").tolist() == [2.0**-22] * 4


def test_a_scale_is_rounded_up_to_the_next_power_of_two_and_only_then() -> None:
    just_above, just_below = (np.nextafter(np.float32(448), np.float32(n)) for n in (999, 0))
    amax = torch.tensor([just_below, 448.0, just_above, 256.0, 224.0, 1.0, 3e38])
    assert block_scales(amax, "power-of-two").tolist() == [
        *(1.0, 1.0, 2.0, 1.0, 0.5, 2.0**-8, 2.0**120),
    ]


def test_a_block_whose_largest_is_a_power_of_two_uses_the_whole_range() -> None:
    values = torch.zeros(1, 128)
    values[0, :4] = torch.tensor([2.0, -2.0, 1.0, 2.0**-9])
    got, scales = quantise(values, "fp32")
    assert scales.item() == float(np.float32(2) / np.float32(448))
    # 1 is 224 times the scale; 2^-9 is 0.4375 times: both are numbers of the format.
    assert got[0, :5].tolist() == [0x7E, 0xFE, 0x76, 0x2E, 0x00]
    got, scales = quantise(values, "power-of-two")
    assert scales.item() == 2.0**-7
    assert got[0, :5].tolist() == [0x78, 0xF8, 0x70, 0x28, 0x00]  # 256, -256, 128, 0.25


@pytest.mark.parametrize("kind", ["fp32", "power-of-two"])
def test_zeros_give_zeros_with_their_signs(kind: ScaleKind) -> None:
    values = torch.zeros(1, 128)
    values[0, 1] = -0.0
    got, scales = quantise(values, kind)
    assert got[0].tolist() == [0x00, 0x80, *[0x00] * 126]
    read = dequantise(got, scales, torch.float32)
    assert read.view(torch.int32).tolist() == values.view(torch.int32).tolist()


def test_each_block_of_a_row_has_its_own_scale() -> None:
    values = torch.cat((torch.full((1, 128), 448.0), torch.full((1, 128), -7.0)), dim=1)
    got, scales = quantise(values, "fp32")
    assert scales.tolist() == [[1.0, 2.0**-6]]
    assert got[0].tolist() == [0x7E] * 128 + [0xFE] * 128
    assert dequantise(got, scales, torch.float32).tolist() == values.tolist()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", ["fp32", "power-of-two"])
def test_a_broken_value_shows_in_its_block_and_in_no_other(kind: ScaleKind, broken: float) -> None:
    values = torch.ones(2, 256)
    values[0, 130] = broken
    read = dequantise(*quantise(values, kind), torch.float32)
    assert read[0, 128:].isnan().all()
    assert torch.isfinite(torch.cat((read[0, :128], read[1]))).all()


@pytest.mark.parametrize("kind", ["fp32", "power-of-two"])
def test_any_rows_have_the_bytes_that_a_search_for_the_nearest_gives(kind: ScaleKind) -> None:
    random = np.random.default_rng(1)
    values = (random.standard_normal((300, 128)) * random.lognormal(0, 3, (300, 128))).astype("f4")
    values[::3] = values[::3].astype(np.float16)  # more ties
    got, scales = quantise(torch.from_numpy(values), kind)
    quotients = values / scales.numpy()
    assert got.numpy().tobytes() == nearest_codes(quotients).tobytes()


def test_bf16_input_is_quantised_as_the_same_numbers_in_fp32() -> None:
    values = torch.randn(5, 256).bfloat16()
    for narrow, wide in zip(
        quantise(values, "fp32"), quantise(values.float(), "fp32"), strict=True
    ):
        assert torch.equal(narrow, wide)

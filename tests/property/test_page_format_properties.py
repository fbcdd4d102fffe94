"""The fp8 formats for any numbers: how far off, what a second encoding changes, whose bytes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_shared_kv.memory.formats.block_fp8 import ScaleKind
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_format import IndexFormat

kinds = st.sampled_from(["fp32", "power-of-two"])


@st.composite
def blocks(draw: st.DrawFn) -> torch.Tensor:
    """Rows of 128 over any magnitudes, with values that hypothesis finds worth a try."""
    count = draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = random.standard_normal((count, 128)) * 2.0 ** draw(st.integers(-40, 100))
    rows *= random.lognormal(0, draw(st.sampled_from([0.0, 2.0, 6.0])), rows.shape)
    finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
    for value in draw(st.lists(finite, max_size=6)):
        rows[random.integers(count), random.integers(128)] = value
    # Above 2^127 a value rounded up to e4m3 times a power of two may exceed fp32.
    return torch.from_numpy(np.clip(rows, -(2.0**127), 2.0**127).astype(np.float32))


def keys_of(scale_kind: ScaleKind) -> IndexFormat:
    return index_format("fp8_scaled", index_head_dim=128, page_size=64, scale_kind=scale_kind)


@settings(max_examples=60, deadline=None)
@given(values=blocks(), scale_kind=kinds)
def test_a_value_is_off_by_at_most_half_a_step(values: torch.Tensor, scale_kind: ScaleKind) -> None:
    codec = keys_of(scale_kind)
    rows = codec.encode(values)
    read = codec.decode(rows, torch.float32).double()
    scales = rows[:, 128:].clone().view(torch.float32).double()
    exact = values.double()
    # Three bits of mantissa, and 2^-9 of the scale below the least normal number.
    bound = torch.maximum(exact.abs() * 2.0**-4, scales * 2.0**-10) * (1 + 2.0**-20)
    assert ((read - exact).abs() <= bound).all()
    assert torch.equal(read.signbit(), exact.signbit())
    # The scale is what puts the largest at the end of the range, or less than twice that.
    least = exact.abs().amax(1, keepdim=True).clamp(min=float(np.float32(1e-4))) / 448
    most = 1.0 if scale_kind == "fp32" else 2.0
    assert (scales >= least * (1 - 2.0**-23)).all()
    assert (scales <= least * most * (1 + 2.0**-23)).all()


@settings(max_examples=60, deadline=None)
@given(values=blocks())
def test_what_was_read_is_stored_as_the_same_bytes(values: torch.Tensor) -> None:
    codec = keys_of("fp32")
    rows = codec.encode(values)
    assert torch.equal(codec.encode(codec.decode(rows, torch.float32)), rows)


@settings(max_examples=60, deadline=None)
@given(values=blocks())
def test_what_was_read_is_read_again_where_scales_are_powers_of_two(values: torch.Tensor) -> None:
    # The bytes may differ: a largest value that was rounded to half the range halves the scale.
    codec = keys_of("power-of-two")
    read = codec.decode(codec.encode(values), torch.float32)
    again = codec.decode(codec.encode(read), torch.float32)
    assert torch.equal(again.view(torch.int32), read.view(torch.int32))


@settings(max_examples=60, deadline=None)
@given(values=blocks(), scale_kind=kinds)
def test_a_row_has_the_same_bytes_alone_as_among_others(
    values: torch.Tensor, scale_kind: ScaleKind
) -> None:
    codec = latent_format(
        "fp8_ds_mla", kv_lora_rank=128, qk_rope_head_dim=6, page_size=4, scale_kind=scale_kind
    )
    rope = values[:, 50:56]
    rows = codec.encode(values, rope)
    for i in range(len(values)):
        assert torch.equal(codec.encode(values[i : i + 1], rope[i : i + 1]), rows[i : i + 1])
        one, one_rope = codec.decode(rows[i : i + 1], torch.bfloat16)
        among, among_rope = codec.decode(rows, torch.bfloat16)
        assert torch.equal(one[0].view(torch.int16), among[i].view(torch.int16))
        assert torch.equal(one_rope[0].view(torch.int16), among_rope[i].view(torch.int16))

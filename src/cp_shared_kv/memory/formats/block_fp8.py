"""Numbers as e4m3 with one fp32 scale for each block of 128: x = e4m3 * scale.

The scale is max(amax, 1e-4) / 448, as in DeepSeek's act_quant, so that the largest of a block
becomes the largest e4m3. The floor keeps a block of zeros from being divided by zero.
"""

from __future__ import annotations

from typing import Literal

import torch

from cp_shared_kv.memory.formats.sections import BLOCK

E4M3_MAX = 448.0
LEAST_AMAX = 1e-4
ScaleKind = Literal["fp32", "power-of-two"]
"""What a block's scale may be: any fp32, or that rounded up to a power of two."""

# Every e4m3 by its code. A look-up, for torch converts e4m3 to fp32 one by one on a CPU.
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def quantise(values: torch.Tensor, scale_kind: ScaleKind) -> tuple[torch.Tensor, torch.Tensor]:
    """values [n, width], any float, width a multiple of 128 -> e4m3 codes u8[n, width] and
    scales fp32[n, width / 128].

    A NaN or an infinity makes its whole block NaN when it is read: a broken model shows. With
    power-of-two scales a magnitude above 2^127 may read back as infinity.
    """
    blocks = values.float().unflatten(1, (-1, BLOCK))
    scales = block_scales(blocks.abs().amax(dim=2), scale_kind)
    return to_e4m3(blocks / scales.unsqueeze(2)).flatten(1), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """codes u8[n, width] and scales fp32[n, width / 128] -> [n, width]: products rounded to fp32,
    then to `dtype`."""
    if codes.is_cuda:
        values = codes.contiguous().view(torch.float8_e4m3fn).float()
    else:
        values = _E4M3_VALUES.index_select(0, codes.flatten().int()).view(codes.shape)
    values.unflatten(1, (-1, BLOCK)).mul_(scales.unsqueeze(2))
    return values.to(dtype)


def block_scales(amax: torch.Tensor, scale_kind: ScaleKind) -> torch.Tensor:
    """The scale of each block by its largest magnitude, fp32 of any shape."""
    # The divisor is a tensor since a CUDA division by a number multiplies by its reciprocal.
    scales = amax.clamp(min=LEAST_AMAX) / amax.new_full((), E4M3_MAX)
    if scale_kind == "fp32":
        return scales
    # By the bits, for no logarithm is exact at every power of two: carry any mantissa upwards.
    rounded_up = (scales.view(torch.int32) + 0x007FFFFF) & 0x7F800000
    return torch.where(scales.isfinite(), rounded_up.view(torch.float32), scales)


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """fp32 to the codes (u8) of the nearest e4m3, ties to even, larger magnitudes to +-448."""
    # Releases of torch differ in what their cast makes of larger ones: NaN, or the largest.
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def reinterpret(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of rows [n, width] as rows of another type, in a tensor of their own."""
    # A copy, for columns of wider rows may lie unaligned, and an empty result have odd strides.
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)

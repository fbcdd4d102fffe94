"""memory/formats/block_fp8.py on a GPU: e4m3 with one fp32 scale for each 128 values.

Twice over: with the instructions that convert to e4m3 (compute capability 8.9 and newer), and in
integers, which older GPUs and Triton's interpreter need (its own conversions truncate). Both give
the bits of the reference; the first takes half as many instructions.
"""
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = tl.constexpr(128)
_E4M3_MAX = tl.constexpr(448.0)
_LEAST_AMAX = tl.constexpr(1e-4)


def converts_to_e4m3(device: torch.device) -> bool:
    """Whether kernels on this device have the instruction."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def quantise(values, POWER_OF_TWO: tl.constexpr, NATIVE: tl.constexpr):
    """values fp32[R, B, 128] -> codes u8[R, B, 128] and scales fp32[R, B]."""
    magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # As integers, magnitudes keep their order, and a NaN is the largest of all.
    amax = tl.max(magnitudes, axis=2).to(tl.float32, bitcast=True)
    amax = tl.where(amax < _LEAST_AMAX, _LEAST_AMAX, amax)
    # Plain division may be off in the last bit.
    scales = tl.div_rn(amax, tl.full(amax.shape, _E4M3_MAX, tl.float32))
    if POWER_OF_TWO:
        bits = scales.to(tl.int32, bitcast=True)
        up = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scales = tl.where(bits < 0x7F800000, up, scales)
    divisors = tl.broadcast_to(scales[:, :, None], values.shape)
    if NATIVE:
        inverse = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)
        quotients = _divided(values, divisors, tl.broadcast_to(inverse[:, :, None], values.shape))
        codes = quotients.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = to_e4m3(tl.div_rn(values, divisors)).to(tl.uint8)
    return codes, scales


@triton.jit
def _divided(values, divisors, inverses):
    """values / divisors, correctly rounded, by the correctly rounded inverses of the divisors.

    Markstein's: a quotient good to one unit in the last place, corrected by its exact remainder.
    Remainders do not underflow here but where the code is 0 anyway, and the sign of a 0 is taken
    from its value.
    """
    quotients = values * inverses
    quotients = tl.fma(tl.fma(-divisors, quotients, values), inverses, quotients)
    quotients = tl.fma(tl.fma(-divisors, quotients, values), inverses, quotients)
    return tl.where(values == 0, values, quotients)


@triton.jit
def to_e4m3(values):
    """fp32 -> i32 codes of the nearest e4m3, ties to even; beyond +-448 the largest; NaN stays."""
    bits = values.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: keep 3 of 23 bits of mantissa, and take the exponent from bias 127 to 7.
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    # Below 2^-6 a code counts steps of 2^-9, the last bit of a sum with 2^14.
    least = tl.minimum(magnitude, 0x3C800000).to(tl.float32, bitcast=True)
    subnormal = (least + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, tl.minimum(normal, 0x7E))
    return sign | tl.where(magnitude > 0x7F800000, 0x7F, code)


@triton.jit
def from_e4m3(codes, NATIVE: tl.constexpr):
    """u8 codes -> fp32, exactly; NaN stays."""
    if NATIVE:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = codes.to(tl.int32)
        magnitude = bits & 0x7F
        # Normal numbers: the mantissa's 3 bits to the top of 23, the exponent from bias 7 to 127.
        normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        values = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
        values = tl.where(magnitude == 0x7F, float("nan"), values)
        values = tl.where(bits >= 0x80, -values, values)
    return values

"""Rotary position embedding in its two pairings, with YaRN's frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from cp_shared_kv.model.architectures import RopeStyle
from cp_shared_kv.model.rope_parameters import RopeParameters, YarnParameters


@dataclass(frozen=True)
class Rotation:
    """cos and sin of one batch's angles, fp32 [t, width / 2]; computed once a forward."""

    cos: torch.Tensor
    sin: torch.Tensor

    def apply(self, x: torch.Tensor, style: RopeStyle) -> torch.Tensor:
        """Rotate x[t, heads, width] in fp32 and return it in its own dtype and order.

        interleaved pairs dimensions 2i and 2i + 1; half-split pairs i and i + width / 2.
        """
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        wide = x.float()
        if style == "interleaved":
            first, second = wide[..., 0::2], wide[..., 1::2]
        else:
            first, second = wide.chunk(2, dim=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        if style == "interleaved":
            return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
        return torch.cat(turned, dim=-1).to(x.dtype)


class RotaryEmbedding:
    """The frequencies of a model: base theta, stretched by YaRN where the config says so."""

    def __init__(
        self, parameters: RopeParameters, width: int, device: torch.device | None = None
    ) -> None:
        exponents = torch.arange(0, width, 2).float() / width
        periods = parameters.theta**exponents
        self._frequencies = 1.0 / periods
        self._scale = parameters.rotation_scale
        if parameters.yarn is not None:
            # The order of these fp32 roundings is transformers' and SGLang's: one unit in the
            # last place of a frequency is an angle of 1e-3 at position 10,000.
            kept = 1 - _stretched_share(parameters.yarn, parameters.theta, width)
            stretched = 1.0 / (parameters.yarn.factor * periods)
            self._frequencies = stretched * (1 - kept) + self._frequencies * kept
        # Computed on the host for every device: another's powers may round differently.
        self._frequencies = self._frequencies.to(device)

    def at(self, positions: torch.Tensor) -> Rotation:
        """The rotation at positions i64[t]. Angles are products of fp32 numbers, as in training."""
        angles = positions.float().unsqueeze(1) * self._frequencies
        return Rotation(angles.cos() * self._scale, angles.sin() * self._scale)


def _stretched_share(yarn: YarnParameters, theta: float, width: int) -> torch.Tensor:
    """How far each frequency is stretched: 0 for the fast ones, 1 for the slow, a ramp between."""

    def dimension(turns: float) -> float:
        # The dimension that makes this many turns over the original context.
        wavelength = yarn.original_context_length / (turns * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), width - 1)
    steps = torch.arange(width // 2, dtype=torch.float32) - low
    return (steps / ((high - low) or 0.001)).clamp(0, 1)

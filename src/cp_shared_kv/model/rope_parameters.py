"""Rotary-embedding settings out of a config.json, in its newer or its older spelling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cp_shared_kv.model.json_fields import boolean, number, refuse


@dataclass(frozen=True)
class YarnParameters:
    """YaRN (Peng et al. 2023) as DeepSeek uses it: always on, whatever the prompt's length."""

    factor: float
    original_context_length: float
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class RopeParameters:
    """What the rotary embedding needs; without YaRN `yarn` is None."""

    theta: float
    yarn: YarnParameters | None = None

    @property
    def rotation_scale(self) -> float:
        """The factor on cos and sin: 1 where mscale equals mscale_all_dim, as in DeepSeek's."""
        yarn = self.yarn
        if yarn is None:
            return 1.0
        if yarn.mscale and yarn.mscale_all_dim:
            return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
        return _mscale(yarn.factor, 1.0)

    @property
    def softmax_multiplier(self) -> float:
        """The factor on MLA's softmax scale. The indexer does not take it."""
        if self.yarn is None or not self.yarn.mscale_all_dim:
            return 1.0
        return _mscale(self.yarn.factor, self.yarn.mscale_all_dim) ** 2


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_parameters(config: Mapping[str, Any]) -> RopeParameters:
    """Read `rope_parameters`, or the older `rope_scaling` beside `rope_theta`.

    Raises ConfigError on a rope type other than default and yarn, and on a setting that is
    missing or of another sort.
    """
    settings: Any = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, Mapping):
        raise refuse("rope_parameters", settings, "an object")
    where = settings if "rope_theta" in settings else config
    theta = number(where, "rope_theta", 10000.0, above=1.0)
    if number(settings, "partial_rotary_factor", 1.0) != 1.0:
        allowed = "1 (qk_rope_head_dim already says how much is rotated)"
        raise refuse("partial_rotary_factor", settings["partial_rotary_factor"], allowed)
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    if rope_type == "default":
        return RopeParameters(theta)
    if rope_type != "yarn":
        raise refuse("rope_type", rope_type, "default, yarn")
    if settings.get("attention_factor") is not None:
        raise refuse("attention_factor", settings["attention_factor"], "null, as mscale gives it")
    if not boolean(settings, "truncate", True):
        raise refuse("truncate", False, "true")
    return RopeParameters(
        theta,
        YarnParameters(
            factor=number(settings, "factor"),
            original_context_length=number(settings, "original_max_position_embeddings"),
            beta_fast=number(settings, "beta_fast", 32.0),
            beta_slow=number(settings, "beta_slow", 1.0),
            mscale=number(settings, "mscale", 0.0, above=-1.0),
            mscale_all_dim=number(settings, "mscale_all_dim", 0.0, above=-1.0),
        ),
    )

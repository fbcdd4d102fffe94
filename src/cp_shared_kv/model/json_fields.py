"""Typed reading of one object of a config.json: each refusal names the field and what it allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cp_shared_kv.errors import ConfigError


def refuse(field: str, value: object, allowed: str) -> ConfigError:
    """The error for a field whose value cannot be used."""
    return ConfigError(f"config.json: {field}", value=repr(value), allowed=allowed)


def integer(
    fields: Mapping[str, Any], name: str, default: int | None = None, least: int = 1
) -> int:
    """An integer of `least` or more. A field that is absent or null takes the default, if any."""
    value = _given(fields, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refuse(name, value, f"an integer of {least} or more")
    return value


def number(
    fields: Mapping[str, Any], name: str, default: float | None = None, above: float = 0.0
) -> float:
    """A finite number above `above`. A field that is absent or null takes the default, if any."""
    value = _given(fields, name, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not above < value < math.inf
    ):
        raise refuse(name, value, f"a finite number above {above:g}")
    return float(value)


def boolean(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or false. A field that is absent or null takes the default."""
    value = _given(fields, name, default)
    if not isinstance(value, bool):
        raise refuse(name, value, "true, false")
    return value


def _given(fields: Mapping[str, Any], name: str, default: object) -> Any:
    value = fields.get(name)
    return default if value is None else value

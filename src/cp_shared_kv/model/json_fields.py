"""Typed reading of one object of a config.json: each refusal names the field and what it allows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from cp_shared_kv.errors import ConfigError

MAX_INTEGER = 2**31 - 1
"""Far more than any size of a model, and small enough to be multiplied with others."""
_SHOWN_CHARACTERS = 200


def refuse(field: str, value: object, allowed: str, file: str = "config.json") -> ConfigError:
    """The error for a field whose value cannot be used."""
    shown = repr(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = f"{shown[:_SHOWN_CHARACTERS]} ... ({len(shown)} characters)"
    return ConfigError(f"{file}: {field}", value=shown, allowed=allowed)


def integer(
    fields: Mapping[str, Any],
    name: str,
    default: int | None = None,
    least: int = 1,
    most: int = MAX_INTEGER,
) -> int:
    """An integer of `least` to `most`. A field that is absent or null takes the default, if any."""
    value = _given(fields, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise refuse(name, value, f"an integer of {least} or more, at most {most}")
    return value


def number(
    fields: Mapping[str, Any], name: str, default: float | None = None, above: float = 0.0
) -> float:
    """A finite number above `above`. A field that is absent or null takes the default, if any."""
    value = _given(fields, name, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not above < value <= sys.float_info.max  # an integer may be larger, and finite
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

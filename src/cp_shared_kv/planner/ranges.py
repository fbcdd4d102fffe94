"""Numbers of the command line: finite, and neither below nor above what makes sense."""

from __future__ import annotations

import math

from cp_shared_kv.errors import ConfigError


def check_above_zero(flag: str, value: float | None, most: int | None = None) -> None:
    """Refuse what is not above 0, is not finite or exceeds `most` with ConfigError; None is a flag
    not given."""
    if value is not None and not (0 < value < math.inf and (most is None or value <= most)):
        upper = "finite" if most is None else f"at most {most}"
        raise ConfigError(f"{flag} is out of range", value=value, allowed=f"above 0, {upper}")


def check_at_least(flag: str, value: float | None, least: int, most: int | None = None) -> None:
    """Refuse what is below `least`, is not finite or exceeds `most` with ConfigError; None is a
    flag not given."""
    if value is not None and not (least <= value < math.inf and (most is None or value <= most)):
        allowed = f"{least} or more" if most is None else f"{least} to {most}"
        raise ConfigError(f"{flag} is out of range", value=value, allowed=allowed)

"""Numbers of the command line: finite, and not below what makes sense."""

from __future__ import annotations

import math

from cp_shared_kv.errors import ConfigError


def check_above_zero(flag: str, value: float | None) -> None:
    """Refuse what is not a finite number above 0 with ConfigError; None is a flag not given."""
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{flag} is out of range", value=value, allowed="above 0, finite")


def check_at_least(flag: str, value: float | None, least: int) -> None:
    """Refuse what is below `least` or not finite with ConfigError; None is a flag not given."""
    if value is not None and not least <= value < math.inf:
        raise ConfigError(f"{flag} is out of range", value=value, allowed=f"{least} or more")

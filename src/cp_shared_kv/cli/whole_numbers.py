"""Lists of whole numbers on the command line, as 8,16,32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter, Token


def _parse(_type: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """ValueError, which cyclopts shows with the flag's name, unless all are whole numbers."""
    parts = [part.strip() for token in tokens for part in token.value.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal() and int(part) > 0)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no whole number above 0; give some as 8,16,32")
    return tuple(int(part) for part in parts)


WholeNumbers = Annotated[tuple[int, ...], Parameter(converter=_parse, n_tokens=1)]

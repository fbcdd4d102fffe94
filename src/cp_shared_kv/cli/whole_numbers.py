"""Whole numbers on the command line, and lists of them, as 8,16,32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, get_args

from cyclopts import ArgumentCollection, CoercionError, Group, Parameter, Token


def _parse(_type: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """ValueError, which cyclopts shows with the flag's name, unless all are whole numbers."""
    parts = [part.strip() for token in tokens for part in token.value.split(",")]
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal() and int(part) > 0)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no whole number above 0; give some as 8,16,32")
    return tuple(int(part) for part in parts)


WholeNumbers = Annotated[tuple[int, ...], Parameter(converter=_parse, n_tokens=1)]


def _refuse_fractions(arguments: ArgumentCollection) -> None:
    """CoercionError for a fraction where a whole number is wanted: cyclopts would round it."""
    for argument in arguments:
        wanted: tuple[Any, ...] = get_args(argument.hint) or (argument.hint,)
        if int in wanted and float not in wanted:
            for token in argument.tokens:
                if "." in token.value:
                    raise CoercionError(argument=argument, token=token, target_type=int)


PARAMETERS = Group("Parameters", validator=_refuse_fractions)
"""The group of all flags that name none."""

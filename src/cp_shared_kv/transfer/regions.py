"""A named run of memory that a transport can reach."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`nbytes` bytes under a name that is unique to one life of one process.

    The name carries its owner's epoch, so an earlier life's region is never mapped by mistake.
    It travels in Hello and ends up in a path: letters, digits, `.`, `_` and `-` only.
    """

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\Z")]
    nbytes: Annotated[int, Meta(ge=1, le=1 << 60)]

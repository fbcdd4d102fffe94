"""A named run of memory that a transport can reach."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

ADDRESS_SPACE_BYTES = 1 << 63
"""No process has memory at or above it: the upper half of the addresses is the kernel's."""


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`nbytes` bytes under a name that is unique to one life of one process.

    The name carries its owner's epoch, so an earlier life's region is never mapped by mistake.
    It travels in Hello and ends up in a path: letters, digits, `.`, `_` and `-` only.

    `address` is where the region lies in its owner's memory, for transports that write to
    addresses; 0 where it is mapped by name. Whoever decodes a region has it checked that no
    byte of it lies outside the address space.

    `ipc_handle` are the 64 bytes by which CUDA maps memory of a GPU, in hexadecimal; empty for any
    other memory.
    """

    name: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\Z")]
    nbytes: Annotated[int, Meta(ge=1, le=1 << 60)]
    address: Annotated[int, Meta(ge=0, le=ADDRESS_SPACE_BYTES - 1)] = 0
    ipc_handle: Annotated[str, Meta(pattern=r"\A([0-9a-f]{128})?\Z")] = ""

    def __post_init__(self) -> None:
        if self.address + self.nbytes > ADDRESS_SPACE_BYTES:
            raise ValueError(
                f"region of {self.nbytes} bytes at address {self.address} passes the end of the "
                f"address space; allowed: address + nbytes up to {ADDRESS_SPACE_BYTES}"
            )

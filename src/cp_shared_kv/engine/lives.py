"""Names of processes and of their lives: what restarts keeps its name and gets the next number.

A unit lives and dies as one: a prefill group (its controller and N ranks), a decode worker, the
server. Sockets and identities carry the life, so nothing meant for an earlier one can arrive.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from cp_shared_kv.errors import InvariantError, ProtocolError

Role = Literal["prefill", "decode", "server"]
PATTERN = r"(prefill|decode|server)-(0|[1-9][0-9]{0,3})\.([1-9][0-9]{0,8})"
_TEXT = re.compile(PATTERN)


@dataclass(frozen=True, order=True)
class Life:
    """One life of a unit, such as `prefill-0.2`: the second life of the first prefill group."""

    role: Role
    index: int
    number: int

    @property
    def unit(self) -> str:
        """The name that all its lives share, such as `prefill-0`."""
        return f"{self.role}-{self.index}"

    @property
    def identity(self) -> bytes:
        """What its process is called on zmq links."""
        return str(self).encode()

    def rank_identity(self, rank: int) -> bytes:
        """What a rank of this prefill group is called on zmq links."""
        return f"{self}/rank-{rank}".encode()

    def next(self) -> Life:
        """The life after this one."""
        return Life(self.role, self.index, self.number + 1)

    def __str__(self) -> str:
        return f"{self.unit}.{self.number}"

    @classmethod
    def parse(cls, text: str | bytes) -> Life:
        """Inverse of `str` and of `identity`; ProtocolError for anything else."""
        plain = text.decode("ascii", "replace") if isinstance(text, bytes) else text
        match = _TEXT.fullmatch(plain)
        if match is None:
            raise ProtocolError("name of a process's life", value=repr(plain[:40]))
        role, index, number = match.groups()
        return cls(role, int(index), int(number))  # type: ignore[arg-type]  (the pattern has them)


def first_lives(prefill_groups: int, decode_workers: int, *, server: bool) -> list[Life]:
    """The units of a run, in the order in which they are started."""
    groups = [Life("prefill", index, 1) for index in range(prefill_groups)]
    workers = [Life("decode", index, 1) for index in range(decode_workers)]
    if not groups or not workers:
        raise InvariantError("a run without prefill group or decode worker")
    return [*groups, *workers, *([Life("server", 0, 1)] if server else [])]

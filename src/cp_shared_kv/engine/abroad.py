"""What a supervisor shares with other hosts: news of processes, both ways."""

from __future__ import annotations

from typing import Protocol

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ProcessDown, ProcessUp
from cp_shared_kv.engine.satellite_messages import Condemned

News = ProcessUp | ProcessDown | Condemned
"""Condemned: a unit of this host that is to be replaced."""


class Abroad(Protocol):
    """The other hosts of a run, to the supervisor of this one, whose thread alone calls it."""

    def exchange(self, now_seconds: float) -> list[News]:
        """Take what came in, say that we live; returns what is to be done or told on this host."""
        ...

    def known(self) -> list[ProcessUp]:
        """The processes of other hosts that can be reached now."""
        ...

    def tell(self, news: ProcessUp | ProcessDown) -> None:
        """A life of this host is up, at an address for other hosts, or over."""
        ...

    def gave_up(self, life: Life, reason: str) -> None:
        """A process of this host cannot work with a life of another: it should be replaced."""
        ...

    def close(self, reason: str) -> None:
        """This host's processes have ended: say why, and hear no more. Again: no effect."""
        ...

"""Decode workers of other hosts: which satellites have joined, which lives are up. No I/O.

A satellite whose one connection breaks, or that is silent, counts as gone, and its lives as over.
That is safe for prefill, which only writes to them: nobody will read those pages. When it comes
back, its units get other names.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from cp_shared_kv._version import __version__
from cp_shared_kv.engine.abroad import News
from cp_shared_kv.engine.child import ALIVE_SECONDS
from cp_shared_kv.engine.codecs import FROM_SATELLITE, ToSatellite
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ProcessDown, ProcessUp
from cp_shared_kv.engine.satellite_messages import (
    MAX_GUESTS,
    Condemned,
    Dismissed,
    Join,
    Leave,
    Refused,
    RunOver,
    StillHere,
    Terms,
)
from cp_shared_kv.engine.satellite_session import SatelliteSession
from cp_shared_kv.engine.spawning import STOP_SECONDS
from cp_shared_kv.engine.waking_time import WakingTime
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.transfer.messages import as_reason

LONGEST_STEP_SECONDS = 0.5
"""What a pause of the supervisor counts as: it looks five times as often."""
FAREWELL_SECONDS = STOP_SECONDS + 1.0
MAX_INDEX = 9999
"""The last index that a unit's name has room for."""

logger = logging.getLogger("cp_shared_kv")


class Door(Protocol):
    """Where satellites connect (guest_door.py)."""

    def receive(self, wait_seconds: float = 0.0) -> tuple[bytes, bytes] | None:
        """The next message and the connection that it came on; None if none comes in time."""
        ...

    def send(self, satellite: bytes, message: ToSatellite) -> bool:
        """Whether the connection still stands; does not wait."""
        ...

    def close(self) -> None:
        """Let what was sent leave, and hear no more. Again: no effect."""
        ...


class Guests:
    """Implements `Abroad` for the supervisor of a run. `terms` makes what a satellite with these
    lives is told; indices from `first_index` on are free for its units."""

    def __init__(
        self,
        door: Door,
        terms: Callable[[tuple[str, ...]], Terms],
        *,
        first_index: int,
        watchdog_seconds: float,
    ) -> None:
        self._door = door
        self._terms = terms
        self._next_index = first_index
        self._watchdog_seconds = watchdog_seconds
        self._waking = WakingTime(LONGEST_STEP_SECONDS)
        self._satellites: dict[bytes, SatelliteSession] = {}
        self._here: dict[str, ProcessUp] = {}
        """What of this host satellites can reach."""
        self._next_alive_seconds = 0.0

    def exchange(self, now_seconds: float) -> list[News]:
        """Hear satellites and look after them; returns which of their lives are up or over."""
        awake_seconds = self._waking.at(now_seconds)
        news: list[News] = []
        while (came := self._door.receive()) is not None:
            satellite, data = came
            try:
                news += self._take(satellite, data, awake_seconds)
            except ProtocolError as error:
                logger.error("message of a satellite refused: %s", error)
                news += self._dismiss(satellite, str(error))
        for name, satellite in list(self._satellites.items()):
            silence = awake_seconds - satellite.heard_seconds
            if silence > self._watchdog_seconds:
                reason = f"it was silent for {silence:.0f} s (--watchdog-timeout)"
                news += self._dismiss(name, reason)
        if now_seconds >= self._next_alive_seconds:
            self._next_alive_seconds = now_seconds + ALIVE_SECONDS
            for name in list(self._satellites):
                if not self._door.send(name, StillHere()):
                    news += self._gone(name, "its connection is lost")
        return news

    def known(self) -> list[ProcessUp]:
        """Every life that is up."""
        return [up for satellite in self._satellites.values() for up in satellite.known()]

    def tell(self, news: ProcessUp | ProcessDown) -> None:
        """News of this host; guests have no business with its decode workers."""
        life = Life.parse(news.life)
        if life.role == "decode":
            return
        if isinstance(news, ProcessUp):
            self._here[life.unit] = news
        else:
            self._here.pop(life.unit, None)
        for name in self._satellites:
            self._door.send(name, news)

    def gave_up(self, life: Life, reason: str) -> None:
        """Have a life replaced by its satellite; nothing if it is over already, or of this host."""
        for name, satellite in self._satellites.items():
            if satellite.is_up(life):
                self._door.send(name, Condemned(life=str(life), reason=as_reason(reason)))

    def close(self, reason: str) -> None:
        """The run is over: satellites end, which is awaited for a while."""
        for name in list(self._satellites):
            if not self._door.send(name, RunOver(reason=as_reason(reason))):
                del self._satellites[name]
        # A connection that is closed takes along what its other end has not read.
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self._satellites and (left := deadline - time.monotonic()) > 0:
            came = self._door.receive(left)
            if came is not None and _is_leave(came[1]):
                self._satellites.pop(came[0], None)
        self._satellites.clear()
        self._door.close()

    # What satellites say ----------------------------------------------------------------------

    def _take(self, name: bytes, data: bytes, awake_seconds: float) -> list[News]:
        message = FROM_SATELLITE.decode(data)
        satellite = self._satellites.get(name)
        if satellite is None:
            if isinstance(message, Join):
                self._admit(name, message, awake_seconds)
            elif not isinstance(message, Leave):
                self._door.send(name, Dismissed(reason="no session of this connection stands"))
            return []
        satellite.heard_seconds = awake_seconds
        match message:
            case ProcessUp():
                return satellite.take_up(message)
            case ProcessDown():
                return satellite.take_down(message)
            case Leave():
                return self._gone(name, message.reason)
            case Join():
                raise ProtocolError("a satellite joins twice", value=satellite.host)
            case StillHere():
                return []

    def _admit(self, name: bytes, join: Join, awake_seconds: float) -> None:
        refusal = self._refusal(join)
        if refusal is not None:
            logger.error("a satellite at %s was refused: %s", join.host, refusal)
            self._door.send(name, Refused(reason=refusal))
            return
        indices = range(self._next_index, self._next_index + join.workers)
        self._next_index = indices.stop
        lives = [Life("decode", index, 1) for index in indices]
        self._satellites[name] = SatelliteSession(join.host, lives, awake_seconds)
        logger.warning("%s joins with %s", join.host, ", ".join(life.unit for life in lives))
        self._door.send(name, self._terms(tuple(map(str, lives))))
        for up in self._here.values():
            self._door.send(name, up)

    def _refusal(self, join: Join) -> str | None:
        if join.release != __version__:
            return (
                f"release {join.release} joins a run of release {__version__}; allowed: the same; "
                "to change it: install the same release of cp-shared-kv on both hosts"
            )
        guests = sum(len(satellite.units) for satellite in self._satellites.values())
        if guests + join.workers > MAX_GUESTS:
            return f"{join.workers} more decode workers; allowed: {MAX_GUESTS - guests} more"
        if self._next_index + join.workers - 1 > MAX_INDEX:
            return "no names are left for decode workers; to change it: start the run again"
        return None

    # Ends -------------------------------------------------------------------------------------

    def _dismiss(self, name: bytes, reason: str) -> list[News]:
        self._door.send(name, Dismissed(reason=as_reason(reason)))
        return self._gone(name, reason)

    def _gone(self, name: bytes, reason: str) -> list[News]:
        satellite = self._satellites.pop(name, None)
        if satellite is None:
            return []
        logger.error("%s is gone, with %s: %s", satellite.host, ", ".join(satellite.units), reason)
        return satellite.ended(reason)


def _is_leave(data: bytes) -> bool:
    try:
        return isinstance(FROM_SATELLITE.decode(data), Leave)
    except ProtocolError:
        return False

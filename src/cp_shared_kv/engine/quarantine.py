"""How long the pages of failed rooms have been kept from reuse, and which for too long."""

from __future__ import annotations

from collections.abc import Mapping

from cp_shared_kv.engine.decode_room import DecodeRoom
from cp_shared_kv.transfer.decode_session import DecodeState


class QuarantineWatch:
    """A room counts from the first look that finds it in quarantine."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        self._since_seconds: dict[int, float] = {}

    def overdue(self, rooms: Mapping[int, DecodeRoom], now_seconds: float) -> list[str]:
        """What is to be said of rooms whose ranks should have fallen silent by now."""
        held = {
            name: room.session
            for name, room in rooms.items()
            if room.session is not None and room.session.state is DecodeState.QUARANTINED
        }
        self._since_seconds = {name: self._since_seconds.get(name, now_seconds) for name in held}
        return [
            f"room {name} has {session.reservation.size} pages in quarantine for "
            f"{now_seconds - self._since_seconds[name]:.0f} s; CP ranks {session.waiting_for()} "
            "have not said that they write no more"
            for name, session in held.items()
            if now_seconds - self._since_seconds[name] > self._limit_seconds
        ]

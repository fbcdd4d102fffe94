"""Who of the engine's processes answers, as their client knows it. No I/O; times are given."""

from __future__ import annotations

from collections.abc import Iterable

from cp_shared_kv.engine.figures import SILENCE_SECONDS
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.router import Route


class Presence:
    """The live processes that have said a word, and when they last did."""

    def __init__(self, now_seconds: float) -> None:
        self._heard_seconds: dict[Life, float] = {}
        self._asked_seconds = now_seconds

    @property
    def lives(self) -> list[Life]:
        """Those that have said a word."""
        return list(self._heard_seconds)

    def heard(self, life: Life, now_seconds: float) -> bool:
        """A word of a life; whether it had counted as silent before."""
        last_seconds = self._heard_seconds.get(life)
        self._heard_seconds[life] = now_seconds
        return last_seconds is None or last_seconds < self._silent_before_seconds

    def lost(self, life: Life) -> None:
        """A life is over."""
        self._heard_seconds.pop(life, None)

    def asked(self, now_seconds: float) -> None:
        """All are asked for a word."""
        self._asked_seconds = now_seconds

    def silent_seconds(self, now_seconds: float) -> dict[Life, float]:
        """How long ago each of them last said one."""
        return {life: now_seconds - heard for life, heard in self._heard_seconds.items()}

    def known(self, pairs: Iterable[Route]) -> list[Route]:
        """The pairs of which both ends have said a word.

        A pair is known from its group, maybe before its decode worker has said a first one.
        """
        heard = self._heard_seconds
        return [pair for pair in pairs if pair.group in heard and pair.decode in heard]

    def answering(self, pairs: Iterable[Route]) -> list[Route]:
        """The pairs of which both ends had answered lately when they were last asked."""
        # Not lately by the clock: whoever was stopped itself must not take the others for silent.
        since, heard = self._silent_before_seconds, self._heard_seconds
        return [p for p in self.known(pairs) if min(heard[p.group], heard[p.decode]) >= since]

    @property
    def _silent_before_seconds(self) -> float:
        return self._asked_seconds - SILENCE_SECONDS

    def silence(self, pairs: Iterable[Route], now_seconds: float) -> str | None:
        """What to say when pairs stand and none answers."""
        heard, known = self._heard_seconds, self.known(pairs)
        if not known or self.answering(known):
            return None
        last_heard = max(min(heard[pair.group], heard[pair.decode]) for pair in known)
        return f"the engine has not answered for {now_seconds - last_heard:.0f} s"

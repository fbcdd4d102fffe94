"""The decode workers of one satellite, as it tells of them on one connection. No I/O."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from cp_shared_kv.engine.abroad import News
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ProcessDown, ProcessUp
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.transfer.messages import as_reason

logger = logging.getLogger("cp_shared_kv")


class SatelliteSession:
    """A satellite at `host` that was given `lives` to begin with; `heard_seconds` is when it last
    spoke, in waking time of its judge. ProtocolError, with nothing changed, for news of what is not
    its own or out of turn."""

    def __init__(self, host: str, lives: Sequence[Life], heard_seconds: float) -> None:
        self.host = host
        self.heard_seconds = heard_seconds
        self._next = {life.unit: life for life in lives}
        """The life of each unit that is up, or may come up next."""
        self._up: dict[str, ProcessUp] = {}

    @property
    def units(self) -> list[str]:
        """The names of its decode workers."""
        return list(self._next)

    def known(self) -> list[ProcessUp]:
        """Its lives that are up."""
        return list(self._up.values())

    def is_up(self, life: Life) -> bool:
        """Whether this life is up and its own."""
        up = self._up.get(life.unit)
        return up is not None and up.life == str(life)

    def take_up(self, news: ProcessUp) -> list[News]:
        """A life can be reached; returns what there is to tell."""
        life = self._own(news.life)
        if life.unit in self._up:
            raise ProtocolError(f"{life} comes up", value=f"{self._up[life.unit].life} is up")
        if not re.fullmatch(rf"tcp://{re.escape(self.host)}:[1-9][0-9]{{0,4}}", news.address):
            raise ProtocolError(
                f"the address of {life}",
                value=news.address[:80],
                allowed=f"tcp://{self.host}:PORT",
            )
        self._next[life.unit], self._up[life.unit] = life, news
        return [news]

    def take_down(self, news: ProcessDown) -> list[News]:
        """A life is over and reaped; returns what there is to tell."""
        life = self._own(news.life)
        up = self._up.get(life.unit)
        if up is not None and up.life != news.life:
            raise ProtocolError(f"{life} ends", value=f"{up.life} is up")
        self._up.pop(life.unit, None)
        self._next[life.unit] = life.next()
        logger.error("%s, at %s", news.reason, self.host)
        return [] if up is None else [ProcessDown(life=news.life, reason=news.reason)]

    def ended(self, reason: str) -> list[News]:
        """The session is over, and all its lives with it: what there is to tell."""
        news: list[News] = []
        for unit, life in self._next.items():
            if unit not in self._up:
                if life.number == 1:
                    continue  # nobody has heard of it
                life = Life(life.role, life.index, life.number - 1)
            told = as_reason(f"{unit} went with its satellite at {self.host}: {reason}")
            news.append(ProcessDown(life=str(life), reason=told, final=True))
        return news

    def _own(self, name: str) -> Life:
        life = Life.parse(name)
        expected = self._next.get(life.unit)
        if expected is None or life.number < expected.number:
            raise ProtocolError(
                f"the satellite at {self.host} speaks of {life}",
                allowed=", ".join(map(str, self._next.values())),
            )
        return life

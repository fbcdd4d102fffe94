"""The decode workers on other hosts that a prefill group cannot work with. No I/O but a look."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cp_shared_kv.engine.links import DecodeLink
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.off_host import is_lost, is_off_host
from cp_shared_kv.transfer.messages import as_reason

GREETING_SECONDS = 15.0
"""How long a decode worker on another host may take to answer a greeting."""

logger = logging.getLogger("cp_shared_kv")


class OutOfReach:
    """Has such a life replaced, since what breaks between hosts is not mended; each life once.

    `report` tells the supervisor. One of this host is only logged: it is reported gone by itself.
    """

    def __init__(self, group: Life, report: Callable[[Life, str], None]) -> None:
        self._group = group
        self._report = report
        self._given_up: set[Life] = set()

    def look(self, link: DecodeLink, *, greeted: bool, now_seconds: float) -> None:
        """Give a life up whose link has broken, or that does not answer our greeting."""
        if not is_off_host(link.address) or link.decode in self._given_up:
            return
        if is_lost(link.socket):
            self.give_up(link, "the link to it is lost")
        elif not greeted and now_seconds - link.made_seconds > GREETING_SECONDS:
            self.give_up(
                link,
                f"no answer from {link.address} in {GREETING_SECONDS:.0f} s; to change it: see "
                "that no firewall is between",
            )

    def give_up(self, link: DecodeLink, reason: str) -> None:
        """This group cannot work with the life at the end of a link."""
        if link.decode in self._given_up:
            return
        logger.error("%s and %s cannot work together: %s", self._group, link.decode, reason)
        if is_off_host(link.address):
            self._given_up.add(link.decode)
            self._report(link.decode, as_reason(f"{self._group.unit}: {reason}"))

    def over(self, life: Life) -> None:
        """The life is over, and need not be remembered."""
        self._given_up.discard(life)

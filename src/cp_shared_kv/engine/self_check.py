"""A process's books, checked: what does not add up is logged once and told to the server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from cp_shared_kv.errors import InvariantError

logger = logging.getLogger("cp_shared_kv")


def broken(checks: Iterable[Callable[[], None]]) -> list[str]:
    """What each check that fails says; the others are still made."""
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except InvariantError as error:
            problems.append(str(error))
    return problems


class Bulletin:
    """Passes on what does not add up, whenever that changes: `tell` gets all that is wrong now."""

    def __init__(self, tell: Callable[[list[str]], None]) -> None:
        self._tell = tell
        self._last: list[str] = []

    def post(self, problems: Sequence[str]) -> None:
        """The outcome of a check."""
        now = list(problems)
        for problem in now:
            if problem not in self._last:
                logger.error("the books do not balance: %s", problem)
        if self._last and not now:
            logger.warning("the books balance again")
        if now != self._last:
            self._last = now
            self._tell(now)

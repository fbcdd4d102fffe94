"""Time that a process was awake, for judging the silence of others. No I/O; times are given.

Whoever was stopped itself (SIGSTOP, a paused container, a suspended host) has heard nobody
meanwhile, and must not take that for their silence.
"""

from __future__ import annotations


class WakingTime:
    """A clock that counts a pause of its owner as `longest_step_seconds` and no more.

    The owner asks for the time at least that often; whoever does not, lets others be silent for
    longer. Silence is the difference of two of its times.
    """

    def __init__(self, longest_step_seconds: float) -> None:
        self._last_seconds: float | None = None
        self._longest_step_seconds = longest_step_seconds
        self._awake_seconds = 0.0

    def at(self, now_seconds: float) -> float:
        """Seconds awake since it was first asked.

        `now_seconds` is a monotonic clock's. To be asked before what has come in is read,
        so that nothing read counts as missing.
        """
        if self._last_seconds is not None:
            self._awake_seconds += min(now_seconds - self._last_seconds, self._longest_step_seconds)
        self._last_seconds = now_seconds
        return self._awake_seconds

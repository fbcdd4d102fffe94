"""The signals that ask a command to end in order."""

from __future__ import annotations

import signal
from collections.abc import Callable


def on_stop_signals(told: Callable[[], None]) -> None:
    """Have `told` called for SIGTERM, for Ctrl-C, and when the terminal goes (SIGHUP).

    To call in the main thread. Under nohup, which has SIGHUP ignored, it stays so.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda _number, _frame: told())

"""Side calls for tests that want no threads: each is made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from cp_shared_kv.engine.side_calls import run

T = TypeVar("T")


class CallsAtOnce:
    """SideCalls without threads: each call is made when it is asked for, here."""

    def submit(self, call: Callable[[], T], /) -> Future[T]:
        """Run `call`; the future is done."""
        future: Future[T] = Future()
        run(call, future)
        return future

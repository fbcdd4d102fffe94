"""Calls that may take long, made beside the work of the thread that wants their results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

T = TypeVar("T")


class SideCalls(Protocol):
    """Runs calls elsewhere; a `concurrent.futures.Executor` is one."""

    def submit(self, call: Callable[[], T], /) -> Future[T]:
        """Run `call`; the future has what it returns or raises. Does not wait for it."""
        ...


class ThreadEach:
    """A thread for each call, so that none waits for another that hangs.

    Nor does the end of the process wait for them, as it does for those of a ThreadPoolExecutor.
    """

    def submit(self, call: Callable[[], T], /) -> Future[T]:
        """Run `call` in a thread of its own."""
        future: Future[T] = Future()
        threading.Thread(target=run, args=(call, future), name="side call", daemon=True).start()
        return future


def run(call: Callable[[], T], future: Future[T]) -> None:
    """Make a call here, and put its end into `future`."""
    try:
        result = call()
    except Exception as error:  # whatever it is, it is for whoever wants the result
        future.set_exception(error)
    else:
        future.set_result(result)

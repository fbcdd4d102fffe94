"""An asyncio event loop without I/O whose time is virtual, inside one simulated process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any

from cp_shared_kv.testing.world.clock import Clock
from cp_shared_kv.testing.world.process import Process


class VirtualLoop(asyncio.AbstractEventLoop):
    """What tasks, futures, queues, conditions and time-outs need, and no more.

    Its callbacks run as something that its process takes: none while that is stopped or dead.
    """

    def __init__(self, process: Process, clock: Clock) -> None:
        self._process, self._clock = process, clock
        self._ready: deque[asyncio.Handle] = deque()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._errors: list[BaseException] = []

    def time(self) -> float:
        """Virtual seconds."""
        return self._clock.now_seconds

    def run_ready(self) -> None:
        """Run callbacks until none is ready. Raises what a task has raised."""
        asyncio._set_running_loop(self)  # pyright: ignore[reportPrivateUsage]
        try:
            while self._ready:
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()  # pyright: ignore[reportPrivateUsage]
        finally:
            asyncio._set_running_loop(None)  # pyright: ignore[reportPrivateUsage]
        if self._errors:
            raise self._errors.pop()

    def close(self) -> None:
        """Cancel all tasks."""
        for task in list(self._tasks):
            task.cancel()
        self.run_ready()

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Run it before anything else happens in this process."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run it at that time, or when the process gets to it."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)

        def due() -> None:
            if not handle.cancelled():
                self._ready.append(handle)
                self.run_ready()

        self._clock.after(max(0.0, when - self.time()), lambda: self._process.take(due))
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run it so much later."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, **kwargs: Any
    ) -> asyncio.Task[Any]:
        """A task of this loop, kept until it is done."""
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, **kwargs)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._errors.append(error)

    def get_debug(self) -> bool:
        """asyncio asks."""
        return False

    def is_running(self) -> bool:
        """asyncio asks."""
        return True

    def is_closed(self) -> bool:
        """asyncio asks."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback has raised."""
        self._errors.append(context.get("exception") or AssertionError(str(context)))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """asyncio tells."""

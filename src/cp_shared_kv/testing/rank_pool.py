"""A pool of rank processes for tests: started once, with a hard time limit on every call.

    with RankPool(4) as pool:
        results = pool.run("/path/to/file.py:function", size=2, timeout_seconds=30, seed=1)

Each rank runs `function(context, **arguments)`, see `RankContext`. Arguments and results travel
as JSON. Ranks are spawned, never forked: a rank has nothing of the test process but the file.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import msgspec

from cp_shared_kv.testing.rank_process import Reply, Task

START_SECONDS = 120.0
GRACE_SECONDS = 2.0
"""What the other ranks get to report a failure of their own, after the first."""
LOG_TAIL_BYTES = 6000


class RankPoolError(Exception):
    """A call that failed on a rank or passed its time limit. The pool has been restarted."""


class RankPool:
    """`size` processes of one torch thread each, and a gloo group of the first n for each n."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start()

    def run(
        self,
        function: str,
        *,
        size: int | None = None,
        timeout_seconds: float = 60.0,
        **arguments: Any,
    ) -> list[Any]:
        """What the function returned on ranks 0..size-1, by rank; `size` defaults to all.

        `function` is "package.module:name" or "/path/to/file.py:name". RankPoolError names the
        ranks that failed, with their tracebacks, and those that hung, with where they stood.
        """
        size = self.size if size is None else size
        if not 1 <= size <= self.size:
            raise ValueError(f"{size} ranks wanted of a pool of {self.size}")
        ranks = self._ranks[:size]
        for rank in ranks:
            rank.send(Task(function, size, arguments))
        _collect(ranks, timeout_seconds)
        if not all(rank.succeeded for rank in ranks):
            # The failure of one leaves the others somewhere in a collective: restart them all.
            message = f"{function} on {size} ranks:\n{_explain(ranks, timeout_seconds)}"
            self.close()
            self._start()
            raise RankPoolError(message)
        return [rank.reply.result for rank in ranks if rank.reply is not None]

    def close(self) -> None:
        """End every rank, whatever it is doing."""
        for rank in self._ranks:
            rank.kill()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="cpkv-ranks-")
        path = Path(self._directory.name)
        self._ranks = [_Rank(rank, self.size, path) for rank in range(self.size)]
        _collect(self._ranks, START_SECONDS)
        if not all(rank.succeeded for rank in self._ranks):
            message = f"{self.size} ranks did not start:\n{_explain(self._ranks, START_SECONDS)}"
            self.close()
            raise RankPoolError(message)


class _Rank:
    """The parent's end of one rank process."""

    def __init__(self, rank: int, size: int, directory: Path) -> None:
        self.rank = rank
        self.reply: Reply | None = None
        self._log = directory / f"rank-{rank}.log"
        self._log_start = 0
        self._received = b""
        self.replies_fd, reply_fd = os.pipe()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 (our own module)
                [
                    sys.executable,
                    *("-m", "cp_shared_kv.testing.rank_process"),
                    *(str(rank), str(size), str(directory / "store"), str(reply_fd)),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(reply_fd,),
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            )
        os.close(reply_fd)

    @property
    def succeeded(self) -> bool:
        return self.reply is not None and self.reply.failure is None

    def send(self, task: Task) -> None:
        self.reply = None
        self._log_start = self._log.stat().st_size
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # a dead rank shows when its reply is read
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
            self._process.stdin.flush()

    def receive(self) -> bool:
        """Take what has come; True when it completes a reply, or when the rank has died."""
        data = os.read(self.replies_fd, 1 << 16)
        self._received += data
        if self._received.endswith(b"\n"):
            self.reply = msgspec.json.decode(self._received, type=Reply)
            self._received = b""
        elif not data:
            self.reply = Reply(failure=f"died with exit code {self._process.wait()}")
        return self.reply is not None

    def request_stacks(self) -> None:
        self._process.send_signal(signal.SIGUSR1)

    def log_tail(self) -> str:
        """The end of what the rank has printed during this call."""
        with self._log.open("rb") as log:
            log.seek(max(self._log_start, self._log.stat().st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self.replies_fd)


def _collect(ranks: Sequence[_Rank], timeout_seconds: float) -> None:
    """Wait for the ranks' replies; not much longer once one of them has failed."""
    deadline = time.monotonic() + timeout_seconds
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.replies_fd, selectors.EVENT_READ, rank)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for key, _ in ready:
                rank: _Rank = key.data
                if rank.receive():
                    selector.unregister(rank.replies_fd)
                    if not rank.succeeded:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)


def _explain(ranks: Sequence[_Rank], timeout_seconds: float) -> str:
    """What went wrong on which rank."""
    hung = [rank for rank in ranks if rank.reply is None]
    for rank in hung:
        rank.request_stacks()
    if hung:
        time.sleep(0.5)  # for the stacks to be written
    waited = f"has not ended within {timeout_seconds:g} seconds, or since another rank failed"
    parts: list[str] = []
    for rank in ranks:
        if not rank.succeeded:
            failure = waited if rank.reply is None else rank.reply.failure
            parts.append(f"rank {rank.rank} {failure}\n{rank.log_tail()}".rstrip())
    return "\n".join(parts)

"""HTTP/1.1 connections that are not waited for without end: slow heads, and readers that stop.

uvicorn limits the size of a request's head and the idle time between two requests; what a client
may take to send a head, or to read its answer, it leaves open, and how many may be connected.
"""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 60.0
"""For a request line with its headers, from the connection's beginning or the head's first byte."""
STALL_SECONDS = 60.0
"""For a client to read on while the socket's buffers are full of its answer."""


SAID_AGAIN_SECONDS = 10.0
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\n"
    b"retry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)

logger = logging.getLogger("cp_shared_kv")


class PatientProtocol(H11Protocol):
    """One connection. When it is cut off, the request under way ends like one whose client left."""

    most_connections: ClassVar[int]
    """Open at once; further ones are told to come again."""
    _said_seconds: ClassVar[float] = -SAID_AGAIN_SECONDS

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: its first head is due."""
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            self._say_too_many()
            transport.write(_TOO_MANY)
            transport.close()
            return
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Part of a head or a body."""
        super().data_received(data)
        between_requests = not self.cycle or self.cycle.response_complete
        if not between_requests:
            self._head_timer = _stopped(self._head_timer)
        elif self._head_timer is None:
            self._await_head()

    def pause_writing(self) -> None:
        """The client does not read as fast as its answer comes."""
        super().pause_writing()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        self._stall_timer = _stopped(self._stall_timer)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._head_timer = _stopped(self._head_timer)
        self._stall_timer = _stopped(self._stall_timer)
        super().connection_lost(exc)

    def _say_too_many(self) -> None:
        now_seconds = self.loop.time()
        if now_seconds - self._said_seconds >= SAID_AGAIN_SECONDS:
            type(self)._said_seconds = now_seconds
            logger.warning(
                "%d connections are open, which is as many as the limit of open files leaves room "
                "for; further ones get 503. To change it: raise `ulimit -Hn`",
                self.most_connections,
            )

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()

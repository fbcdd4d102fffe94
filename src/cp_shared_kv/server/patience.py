"""HTTP/1.1 connections that are not waited for without end: slow heads, and readers that stop.

uvicorn limits the size of a request's head and the idle time between two requests; what a client
may take to send a head, or to read its answer, it leaves open.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 60.0
"""For a request line with its headers, from the connection's beginning or the head's first byte."""
STALL_SECONDS = 60.0
"""For a client to read on while the socket's buffers are full of its answer."""


class PatientProtocol(H11Protocol):
    """One connection. When it is cut off, the request under way ends like one whose client left."""

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: its first head is due."""
        super().connection_made(transport)
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

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()

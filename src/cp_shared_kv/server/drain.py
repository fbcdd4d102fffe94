"""The end of a server: no new answers, and the wait for those under way."""

from __future__ import annotations

import asyncio
from collections.abc import Set as AbstractSet

from starlette.types import ASGIApp, Receive, Scope, Send

from cp_shared_kv.server.api_error import SERVER_STOPPING


class Gate:
    """Counts answers under way, and lets none begin once it is closed. For one event loop."""

    def __init__(self) -> None:
        self.closed = False
        self._under_way = 0
        self._nobody = asyncio.Event()
        self._nobody.set()

    def enter(self) -> None:
        """An answer begins."""
        self._under_way += 1
        self._nobody.clear()

    def leave(self) -> None:
        """An answer has ended, in whichever way."""
        self._under_way -= 1
        if not self._under_way:
            self._nobody.set()

    async def drained(self) -> None:
        """Wait until no answer is under way."""
        await self._nobody.wait()


class Drain:
    """ASGI layer at the gate: once it is closed, whoever asks one of `paths` for an answer is sent
    elsewhere."""

    def __init__(self, app: ASGIApp, gate: Gate, paths: AbstractSet[str]) -> None:
        self._app = app
        self._gate = gate
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 503."""
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        if self._gate.closed:
            await SERVER_STOPPING.response()(scope, receive, send)
            return
        self._gate.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._gate.leave()

"""An answer as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cp_shared_kv.engine.api import EngineRefusal
from cp_shared_kv.server.access_log import RequestRecord
from cp_shared_kv.server.answer_format import AnswerFormat, ShownUsage
from cp_shared_kv.server.api_error import SERVER_STOPPING, ApiError
from cp_shared_kv.server.choice_text import Piece
from cp_shared_kv.server.choices import Pieces, TokenCounts
from cp_shared_kv.server.disconnect import ClientGoneError, while_connected
from cp_shared_kv.server.under_way import AnswerEnd

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Some proxies would hold events back to fill a buffer.
    "x-accel-buffering": "no",
}


class EventStream(Response):
    """The answer from its first piece on.

    An engine that fails on the way becomes an error event, after which the response ends without
    `[DONE]`. A client that goes away ends the generation.
    """

    def __init__(
        self,
        answer: AnswerFormat,
        first: tuple[int, Piece],
        pieces: Pieces,
        counts: TokenCounts,
        record: RequestRecord,
        end: AnswerEnd,
        *,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._answer, self._first, self._pieces = answer, first, pieces
        self._counts, self._record, self._end = counts, record, end
        self._include_usage, self._continuous_usage = include_usage, continuous_usage

    async def __call__(
        self,
        scope: Scope,  # noqa: ARG002  (ASGI's signature)
        receive: Receive,
        send: Send,
    ) -> None:
        """Send the events as they come."""
        try:
            await while_connected(receive, self._send(send))
        except (ClientGoneError, TimeoutError):
            self._record.client_gone = True
        except asyncio.CancelledError:
            # The server stops and will not wait any longer.
            await send({"type": "http.response.body", "body": _event(SERVER_STOPPING.body())})
        finally:
            await self._pieces.aclose()

    async def _send(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async with aclosing(self._events()) as events:
            async for event in events:
                body = _event(event)
                # While the client does not read, this waits: its time runs all the same.
                async with asyncio.timeout_at(self._end.deadline):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes]:
        try:
            for event in self._answer.events(*self._first, self._chunk_usage()):
                yield event
            async for index, piece in self._pieces:
                for event in self._answer.events(index, piece, self._chunk_usage()):
                    yield event
        except (EngineRefusal, ApiError) as error:
            failure = ApiError.from_refusal(error) if isinstance(error, EngineRefusal) else error
            yield failure.body()
            return
        if self._include_usage:
            for event in self._answer.usage_events(self._counts.usage()):
                yield event
        yield b"[DONE]"

    def _chunk_usage(self) -> ShownUsage:
        if self._continuous_usage:
            return self._counts.usage()
        # OpenAI's streams with usage have the field in every chunk, null but in the last.
        return None if self._include_usage else msgspec.UNSET


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"

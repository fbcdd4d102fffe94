"""The engine's tokens as OpenAI completions: one object, or server-sent events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cp_shared_kv.engine.api import EngineRefusal, TokenChunk
from cp_shared_kv.server.access_log import RequestRecord
from cp_shared_kv.server.api_error import SERVER_STOPPING, ApiError
from cp_shared_kv.server.detokenizer import StreamDecoder
from cp_shared_kv.server.disconnect import ClientGoneError, while_connected
from cp_shared_kv.server.openai_schema import Completion, CompletionChoice, Usage
from cp_shared_kv.server.tokenizer import Tokenizer

Chunks = AsyncGenerator[TokenChunk]

_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Some proxies would hold events back to fill a buffer.
    "x-accel-buffering": "no",
}


class CompletionAnswer:
    """One answer: its id, and the counts that its usage is made from."""

    def __init__(
        self, model: str, prompt_tokens: int, tokenizer: Tokenizer, eos_token_ids: Sequence[int]
    ) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self.tokenizer = tokenizer
        self._created = int(time.time())
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._completion_tokens = 0
        self._cached_tokens = 0

    def take(self, chunk: TokenChunk) -> Sequence[int]:
        """Count a chunk's tokens; returns those that have text: not the one that stopped it."""
        self._completion_tokens += len(chunk.token_ids)
        self._cached_tokens = chunk.cached_tokens
        token_ids = chunk.token_ids
        stopped = chunk.finish_reason == "stop" and token_ids
        return token_ids[:-1] if stopped and token_ids[-1] in self._eos_token_ids else token_ids

    def usage(self) -> Usage:
        """Counts so far."""
        return Usage.of(self._prompt_tokens, self._completion_tokens, self._cached_tokens)

    def completion(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> bytes:
        """A completion object, or a chunk of a stream, as JSON."""
        return msgspec.json.encode(
            Completion(
                id=self.id, created=self._created, model=self._model, choices=choices, usage=usage
            )
        )


async def whole_completion(answer: CompletionAnswer, chunks: Chunks) -> Response:
    """All of the answer in one response. Raises `EngineRefusal`."""
    token_ids: list[int] = []
    finish_reason = None
    async with aclosing(chunks):
        async for chunk in chunks:
            token_ids += answer.take(chunk)
            finish_reason = chunk.finish_reason
    choice = CompletionChoice(answer.tokenizer.decode(token_ids), finish_reason)
    body = answer.completion([choice], answer.usage())
    return Response(body, media_type="application/json")


class CompletionStream(Response):
    """The answer as server-sent events, from its first chunk on.

    An engine that fails on the way becomes an error event, after which the response ends without
    `[DONE]`. A client that goes away ends the generation.
    """

    def __init__(
        self,
        answer: CompletionAnswer,
        first: TokenChunk,
        chunks: Chunks,
        record: RequestRecord,
        *,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        super().__init__(headers=_STREAM_HEADERS)
        del self.headers["content-length"]
        self._answer, self._first, self._chunks, self._record = answer, first, chunks, record
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
        except ClientGoneError:
            self._record.client_gone = True
        except asyncio.CancelledError:
            # The server stops and will not wait any longer.
            await send({"type": "http.response.body", "body": _event(SERVER_STOPPING.body())})
        finally:
            await self._chunks.aclose()

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
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncGenerator[bytes]:
        answer, chunk = self._answer, self._first
        decoder = StreamDecoder(answer.tokenizer)
        try:
            while True:
                text = decoder.push(answer.take(chunk))
                if chunk.finish_reason is not None:
                    text += decoder.flush()
                if text or chunk.finish_reason is not None:
                    choice = CompletionChoice(text, chunk.finish_reason)
                    yield answer.completion([choice], self._chunk_usage())
                if chunk.finish_reason is not None:
                    break
                chunk = await anext(self._chunks)
        except EngineRefusal as refusal:
            yield ApiError.from_refusal(refusal).body()
            return
        if self._include_usage:
            yield answer.completion([], answer.usage())
        yield b"[DONE]"

    def _chunk_usage(self) -> Usage | msgspec.UnsetType | None:
        if self._continuous_usage:
            return self._answer.usage()
        # OpenAI's streams with usage have the field in every chunk, null but in the last.
        return None if self._include_usage else msgspec.UNSET


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"

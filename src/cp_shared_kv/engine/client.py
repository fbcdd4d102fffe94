"""The engine as the server process reaches it: requests out, tokens and figures in, over zmq."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from cp_shared_kv.engine.api import (
    EngineDescription,
    EngineRefusal,
    EngineStats,
    GenerateRequest,
    Outcome,
    TokenChunk,
    TokenLogprobs,
)
from cp_shared_kv.engine.codecs import FROM_SERVER, TO_SERVER, FromServer
from cp_shared_kv.engine.messages import (
    Admitted,
    Cancel,
    DecodeStats,
    Flush,
    Flushed,
    PrefillStats,
    Registered,
    RoomRefused,
    StatsRequest,
    Submit,
    Tokens,
)
from cp_shared_kv.engine.sampling.wire_params import wire_params
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.transfer.codec import pack_int64

PREFILL, DECODE = b"prefill-0", b"decode-0"
_T = TypeVar("_T")
PING_SECONDS = 1.0
SILENCE_SECONDS = 10.0
"""A process that has not answered for so long counts as lost; a long batch takes less."""

logger = logging.getLogger("cp_shared_kv")


@dataclass
class _Room:
    request_id: str
    inbox: asyncio.Queue[Tokens | Admitted | RoomRefused] = field(
        default_factory=asyncio.Queue[Tokens | Admitted | RoomRefused]
    )


@dataclass
class _Figures:
    prefill: asyncio.Future[PrefillStats]
    decode: asyncio.Future[DecodeStats]


class ClusterClient:
    """Implements `server.engine_client.EngineClient` for the processes of one run.

    Lives in one event loop. `start` before anything else, `close` at the end.
    """

    def __init__(self, address: str, description: EngineDescription) -> None:
        self._description = description
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)
        self._rooms: dict[int, _Room] = {}
        self._room_of: dict[str, int] = {}
        self._tickets: dict[int, _Figures] = {}
        self._flushes: dict[int, asyncio.Future[int]] = {}
        self._next_ticket = 0
        self._registered: set[str] = set()
        self._all_registered = asyncio.Event()
        self._last_answer_seconds = 0.0
        self._outcomes: Counter[Outcome] = Counter(
            {"finished": 0, "aborted": 0, "failed": 0, "refused": 0}
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Wait until prefill and decode have registered."""
        self._tasks.append(asyncio.create_task(self._receive()))
        await self._all_registered.wait()
        self._last_answer_seconds = time.monotonic()
        self._tasks.append(asyncio.create_task(self._ping()))

    async def close(self) -> None:
        """Stop listening. Open requests get no more tokens."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._socket.close()

    async def describe(self) -> EngineDescription:
        """What does not change during the engine's life."""
        return self._description

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Output tokens as they come; see the protocol for what it raises."""
        if not self.healthy()[0]:
            raise EngineRefusal(self.healthy()[1], kind="unavailable")
        params = wire_params(request.sampling)
        number = secrets.randbits(62)
        room = _Room(request.request_id)
        self._rooms[number] = room
        self._room_of[request.request_id] = number
        try:
            await self._send(
                PREFILL,
                Submit(
                    room=number,
                    token_ids=pack_int64(np.asarray(request.prompt_token_ids, dtype=np.int64)),
                    max_tokens=request.max_tokens,
                    sampling=params,
                ),
            )
            async for chunk in self._chunks(room):
                if chunk.finish_reason is not None:
                    self._room_of.pop(request.request_id, None)
                yield chunk
        except EngineRefusal:
            self._room_of.pop(request.request_id, None)
            raise
        finally:
            # A caller that stops early still has to name the request to `abort`.
            self._rooms.pop(number, None)

    async def _chunks(self, room: _Room) -> AsyncGenerator[TokenChunk, None]:
        # Tokens come from decode and the cached count from prefill, on links without a common
        # order: the first tokens wait for the count.
        cached: int | None = None
        early: list[Tokens] = []
        while True:
            message = await room.inbox.get()
            match message:
                case RoomRefused():
                    refused = message.kind in ("too_long", "invalid", "overloaded")
                    self._outcomes["refused" if refused else "failed"] += 1
                    raise EngineRefusal(message.reason, kind=message.kind)
                case Admitted():
                    cached = message.cached_tokens
                case Tokens():
                    early.append(message)
            if cached is None:
                continue
            for tokens in early:
                if tokens.finish_reason is not None:
                    aborted = tokens.finish_reason == "abort"
                    self._outcomes["aborted" if aborted else "finished"] += 1
                yield TokenChunk(tokens.token_ids, tokens.finish_reason, cached, _logprobs(tokens))
                if tokens.finish_reason is not None:
                    return
            early.clear()

    async def abort(self, request_id: str) -> None:
        """Stop a request and free its pages; unknown ones are no error."""
        number = self._room_of.pop(request_id, None)
        if number is not None:
            self._rooms.pop(number, None)
            self._outcomes["aborted"] += 1
            await self._send(PREFILL, Cancel(room=number))

    async def stats(self) -> EngineStats:
        """Figures of this moment, from prefill and decode together."""
        self._next_ticket += 1
        loop = asyncio.get_running_loop()
        figures = _Figures(loop.create_future(), loop.create_future())
        self._tickets[self._next_ticket] = figures
        ticket = self._next_ticket
        try:
            await self._send(PREFILL, StatsRequest(ticket=ticket))
            await self._send(DECODE, StatsRequest(ticket=ticket))
            async with asyncio.timeout(SILENCE_SECONDS):
                prefill, decode = await figures.prefill, await figures.decode
        except TimeoutError:
            raise EngineRefusal(
                f"no figures from the engine in {SILENCE_SECONDS:.0f} s", kind="unavailable"
            ) from None
        finally:
            del self._tickets[ticket]
        return self._join(prefill, decode)

    async def flush_cache(self) -> int:
        """Drop every cached prefix that no request uses; returns how many logical pages."""
        self._next_ticket += 1
        ticket = self._next_ticket
        pages: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._flushes[ticket] = pages
        try:
            await self._send(PREFILL, Flush(ticket=ticket))
            async with asyncio.timeout(SILENCE_SECONDS):
                return await pages
        except TimeoutError:
            raise EngineRefusal(
                f"no answer from the engine in {SILENCE_SECONDS:.0f} s", kind="unavailable"
            ) from None
        finally:
            del self._flushes[ticket]

    def healthy(self) -> tuple[bool, str]:
        """Whether both processes have answered lately."""
        if not self._all_registered.is_set():
            return False, "the engine is starting"
        silence = time.monotonic() - self._last_answer_seconds
        if silence > SILENCE_SECONDS:
            return False, f"the engine has not answered for {silence:.0f} s"
        return True, "ok"

    def _join(self, prefill: PrefillStats, decode: DecodeStats) -> EngineStats:
        return EngineStats(
            available_tokens=prefill.available_tokens,
            cached_tokens=prefill.cached_tokens,
            locked_tokens=prefill.locked_tokens,
            free_pages_per_owner=prefill.free_pages_per_owner,
            queued_requests=prefill.queued,
            prefill_requests=prefill.running,
            decode_queued_requests=decode.waiting,
            decode_requests=decode.running,
            decode_used_tokens=decode.used_tokens,
            prompt_tokens_total=prefill.prompt_tokens_total,
            cached_tokens_total=prefill.cached_tokens_total,
            generated_tokens_total=decode.generated_tokens_total,
            evicted_tokens_total=prefill.evicted_pages_total * self._description.page_size,
            requests_total=dict(self._outcomes),
            failed_transfers_total=decode.failed_rooms_total,
            sent_pages_total=prefill.sent_pages_total,
            sent_descriptors_total=prefill.sent_descriptors_total,
            sent_bytes_total=prefill.sent_bytes_total,
            scratch_bytes=prefill.scratch_bytes,
        )

    async def _send(self, to: bytes, message: FromServer) -> None:
        try:
            await self._socket.send_multipart([to, FROM_SERVER.encode(message)])
        except zmq.ZMQError as error:
            raise EngineRefusal(f"{to.decode()} is not connected", kind="unavailable") from error
        except ProtocolError as error:
            raise EngineRefusal(str(error), kind="too_long") from error

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                self._take(TO_SERVER.decode(frames[-1]))
            except ProtocolError as error:
                logger.error("message refused: %s", error)

    def _take(self, message: msgspec.Struct) -> None:
        match message:
            case Registered():
                self._registered.add(message.role)
                if self._registered == {"prefill", "decode"}:
                    self._all_registered.set()
            case Tokens() | Admitted() | RoomRefused():
                room = self._rooms.get(message.room)
                if room is not None:
                    room.inbox.put_nowait(message)
            case PrefillStats() | DecodeStats():
                figures = self._tickets.get(message.ticket)
                if figures is None:
                    return
                if isinstance(message, PrefillStats):
                    _answer(figures.prefill, message)
                else:
                    _answer(figures.decode, message)
            case Flushed():
                pages = self._flushes.get(message.ticket)
                if pages is not None:
                    _answer(pages, message.pages)
            case _:
                pass

    async def _ping(self) -> None:
        while True:
            with contextlib.suppress(EngineRefusal):
                await self.stats()
                self._last_answer_seconds = time.monotonic()
            await asyncio.sleep(PING_SECONDS)


def _logprobs(tokens: Tokens) -> list[TokenLogprobs] | None:
    if tokens.logprobs is None:
        return None
    told = zip(tokens.token_ids, tokens.logprobs, strict=True)
    return [TokenLogprobs(token_id, one.logprob, one.top) for token_id, one in told]


def _answer(future: asyncio.Future[_T], value: _T) -> None:
    if not future.done():
        future.set_result(value)

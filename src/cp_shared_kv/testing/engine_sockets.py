"""The server's client of the engine, connected to two sockets that a test plays the engine on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from cp_shared_kv.engine.api import EngineDescription, EngineStats, GenerateRequest, TokenChunk
from cp_shared_kv.engine.client import ClusterClient
from cp_shared_kv.engine.codecs import FROM_SERVER, encode
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    DecodeStats,
    Paired,
    PrefillStats,
    ProcessDown,
    ProcessUp,
    Registered,
    StatsRequest,
)
from cp_shared_kv.testing.example_messages import DECODE_STATS, PREFILL_STATS

M = TypeVar("M", bound=msgspec.Struct)
_addresses = itertools.count()
GROUP, DECODE = Life("prefill", 0, 1), Life("decode", 0, 1)

DESCRIPTION = EngineDescription(
    model_name="tiny",
    version="0",
    context_length=100,
    vocab_size=50,
    eos_token_ids=(0,),
    page_size=4,
    cp_size=2,
    shard_policy="page_interleaved",
    kv_read="pull",
    physical_tokens_per_rank=40,
    logical_tokens=80,
    decode_tokens=80,
    pool_bytes_per_rank=1,
    scratch_limit_bytes=1,
    config={},
)


class Engine:
    """Both processes of the engine, as sockets, and the client that is connected to them."""

    def __init__(self, description: EngineDescription = DESCRIPTION) -> None:
        self.address = f"inproc://engine-client-{next(_addresses)}"
        self.client = ClusterClient(self.address, description)
        self.prefill = self.socket(GROUP)
        self.decode = self.socket(DECODE)

    def socket(self, life: Life) -> zmq.asyncio.Socket:
        """One more process."""
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, life.identity)
        socket.linger = 0
        socket.connect(self.address)
        return socket

    async def start(self) -> None:
        starting = asyncio.create_task(self.client.start())
        for life in (GROUP, DECODE):
            await self.up(life)
        await self.prefill.send(encode(Registered()))
        await self.decode.send(encode(Registered()))
        await asyncio.sleep(0.01)
        assert self.client.healthy() == (False, "the engine is starting")
        await self.prefill.send(encode(Paired(decode=str(DECODE))))
        await starting

    async def close(self) -> None:
        await self.client.close()
        self.prefill.close()
        self.decode.close()

    async def next(self, kind: type[M]) -> M:
        """The next message to prefill of a kind."""
        return await next_at(self.prefill, kind)

    async def nothing_but(self, kind: type[msgspec.Struct]) -> None:
        """Nothing else has been sent to prefill by now."""
        await asyncio.sleep(0.02)
        while await self.prefill.poll(timeout=0):
            assert isinstance(FROM_SERVER.decode(await self.prefill.recv()), kind)

    async def answer(self, ticket: int) -> None:
        await self.prefill.send(encode(prefill_stats(ticket)))
        await self.decode.send(encode(decode_stats(ticket)))

    async def figures(self) -> EngineStats:
        """What the client makes of the figures of both."""
        asked = asyncio.create_task(self.client.stats())
        while not asked.done():
            await self.answer((await self.next(StatsRequest)).ticket)
            await asyncio.sleep(0.01)
        return await asked

    def up(self, life: Life) -> Awaitable[None]:
        """The supervisor's word that a process is there."""
        return self.client.on_news(ProcessUp(life=str(life), address="inproc://it"))

    def down(self, life: Life, reason: str = "it was killed") -> Awaitable[None]:
        """The supervisor's word that a process is lost."""
        return self.client.on_news(ProcessDown(life=str(life), reason=reason))

    async def group_is_back(self) -> zmq.asyncio.Socket:
        """The next life of the prefill group, paired with decode."""
        socket = self.socket(GROUP.next())
        await self.up(GROUP.next())
        await socket.send(encode(Registered()))
        await socket.send(encode(Paired(decode=str(DECODE))))
        return socket


async def next_at(socket: zmq.asyncio.Socket, kind: type[M]) -> M:
    """The next message of a kind that the client has sent to a process."""
    while True:
        message = FROM_SERVER.decode(await socket.recv())
        if isinstance(message, kind):
            return message


def prefill_stats(ticket: int, **changes: int) -> PrefillStats:
    return msgspec.structs.replace(PREFILL_STATS, ticket=ticket, **changes)


def decode_stats(ticket: int) -> DecodeStats:
    return msgspec.structs.replace(DECODE_STATS, ticket=ticket)


def request(name: str = "r1", **changes: Any) -> GenerateRequest:
    values: dict[str, Any] = {"request_id": name, "prompt_token_ids": [3, 1, 2], "max_tokens": 5}
    return GenerateRequest(**(values | changes))


def with_engine(test: Callable[[Engine], Awaitable[None]]) -> None:
    """Run a test on an engine that has started, for 20 s at most."""

    async def run() -> None:
        engine = Engine()
        try:
            async with asyncio.timeout(20):
                await engine.start()
                await test(engine)
        finally:
            await engine.close()

    asyncio.run(run())


async def collect(engine: Engine, asked: GenerateRequest) -> list[TokenChunk]:
    """All that a caller of `generate` gets."""
    return [chunk async for chunk in engine.client.generate(asked)]

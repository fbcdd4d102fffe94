"""Mutants among the answers that the server's client gets from its two processes."""

from __future__ import annotations

import asyncio
import contextlib
import random

import msgspec
import zmq
import zmq.asyncio

from cp_shared_kv.engine.api import EngineRefusal, GenerateRequest, Sampling
from cp_shared_kv.engine.client import ClusterClient
from cp_shared_kv.engine.codecs import FROM_SERVER, encode
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    Admitted,
    Check,
    Checked,
    DecodeStats,
    Paired,
    PrefillStats,
    ProcessUp,
    Registered,
    StatsRequest,
    Submit,
    Tokens,
)
from cp_shared_kv.testing.engine_sockets import DECODE, DESCRIPTION, GROUP
from cp_shared_kv.testing.example_messages import ENGINE_MESSAGES
from cp_shared_kv.testing.mutations import Mutator


class HostileEngine:
    """Two processes that answer the server's client, with mutants around every answer."""

    def __init__(self, address: str, seed: int) -> None:
        self._chance = random.Random(seed)
        self._mutator = Mutator(self._chance)
        for message in ENGINE_MESSAGES:
            self._mutator.saw(encode(message))
        self._sockets = {life: self._socket(address, life) for life in (GROUP, DECODE)}
        self.mutants = 0
        self.calm = False

    @staticmethod
    def _socket(address: str, life: Life) -> zmq.asyncio.Socket:
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, life.identity)
        socket.linger = 0
        socket.connect(address)
        return socket

    async def say(self, life: Life, message: msgspec.Struct) -> None:
        data = encode(message)
        mutants = [] if self.calm else [self._mutator.mutate(data) for _ in range(4)]
        before = self._chance.randint(0, len(mutants))
        for part in (*mutants[:before], data, *mutants[before:]):
            await self._sockets[life].send(part)
        self.mutants += len(mutants)

    async def run(self, life: Life) -> None:
        while True:
            message = FROM_SERVER.decode(await self._sockets[life].recv())
            match message:
                case Submit():
                    await self.say(GROUP, Admitted(room=message.room, cached_tokens=0))
                    last = Tokens(room=message.room, token_ids=[3, 4], finish_reason="length")
                    await self.say(DECODE, last)
                case StatsRequest():
                    await self.say(life, stats_of(life, message.ticket))
                case Check():
                    await self.say(life, Checked(ticket=message.ticket, problems=[]))
                case _:
                    pass

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close()


def stats_of(life: Life, ticket: int) -> msgspec.Struct:
    kind = PrefillStats if life == GROUP else DecodeStats
    example = next(message for message in ENGINE_MESSAGES if isinstance(message, kind))
    return msgspec.structs.replace(example, ticket=ticket)


async def client_mutants(requests: int) -> int:
    """Ask so many times while mutants arrive, then once more in peace; how many arrived."""
    address = f"inproc://hostile-client-{requests}"
    client = ClusterClient(address, DESCRIPTION)
    engine = HostileEngine(address, seed=requests)
    tasks = [asyncio.create_task(engine.run(life)) for life in (GROUP, DECODE)]

    async def ask(name: str) -> list[int]:
        request = GenerateRequest(
            request_id=name, prompt_token_ids=[1, 2, 3], max_tokens=2, sampling=Sampling()
        )
        async with asyncio.timeout(20):
            return [token async for c in client.generate(request) for token in c.token_ids]

    for life in (GROUP, DECODE):
        await client.on_news(ProcessUp(life=str(life), address=address))
        await engine.say(life, Registered())
    starting = asyncio.create_task(client.start())
    await engine.say(GROUP, Paired(decode=str(DECODE)))
    async with asyncio.timeout(20):
        await starting
    for number in range(requests):
        with contextlib.suppress(EngineRefusal):
            await ask(f"request {number}")
        with contextlib.suppress(EngineRefusal):
            await client.stats()
        await client.check_invariants()
    engine.calm = True
    for life in (GROUP, DECODE):
        await engine.say(life, Checked(ticket=0, problems=[]))
    assert await ask("afterwards") == [3, 4]
    assert client.healthy() == (True, "ok")
    assert (await client.check_invariants())["router"] == []
    for task in tasks:
        assert not task.done()
        task.cancel()
    await client.close()
    engine.close()
    return engine.mutants

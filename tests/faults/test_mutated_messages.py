"""Mutated messages on every link: refused or handled, and nothing else happens.

Three ways in. Every decoder alone; a whole group without processes, where mutants arrive between
the messages of real requests (testing/hostile_group.py); and a rank worker with its model and
shared memory (testing/hostile_worker.py). A seed that fails says so and can be run alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from cp_shared_kv.engine import codecs
from cp_shared_kv.engine.api import EngineDescription, EngineRefusal, GenerateRequest, Sampling
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
    Registered,
    StatsRequest,
    Submit,
    Tokens,
)
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.testing.example_messages import ENGINE_MESSAGES, TRANSFER_MESSAGES
from cp_shared_kv.testing.hostile_group import (
    FROM_RANKS,
    PAIR,
    SERVER_LINKS,
    TO_RANKS,
    HostileGroup,
    Link,
)
from cp_shared_kv.testing.hostile_worker import HostileWorker
from cp_shared_kv.testing.mutations import Mutator
from cp_shared_kv.transfer.codec import Codec

DECODERS: dict[str, Codec[Any]] = {
    "server to engine": codecs.FROM_SERVER,
    "engine to server": codecs.TO_SERVER,
    "controller to rank": codecs.TO_RANK,
    "rank to controller": codecs.FROM_RANK,
    "decode to rank": codecs.DECODE_TO_RANK,
    "decode to controller": codecs.DECODE_TO_CONTROLLER,
    "to decode": codecs.TO_DECODE,
    "supervisor to child": codecs.FROM_SUPERVISOR,
    "recording": codecs.RECORDED,
}
HOSTILE: dict[str, frozenset[Link]] = {
    "clients, and decode to the ranks": SERVER_LINKS | TO_RANKS,
    "the ranks": FROM_RANKS,
    "controller and decode": PAIR,
    "all at once": SERVER_LINKS | TO_RANKS | FROM_RANKS | PAIR,
}
STEPS = 150


def group_mutants(hostile: frozenset[Link], at_least: int) -> tuple[int, int]:
    """Run groups until so many mutants have arrived; how many did, and how many were refused."""
    mutants = refused = 0
    for seed in itertools.count():
        if mutants >= at_least:
            return mutants, refused
        try:
            group = HostileGroup(seed, hostile)
            group.run(STEPS)
            group.settle()
        except Exception as error:
            error.add_note(f"seed {seed} with {sorted(hostile)}")
            raise
        mutants += group.mutants
        refused += group.refused
    raise AssertionError


def rank_mutants(directory: Path, at_least: int) -> tuple[int, int]:
    with HostileWorker(directory, seed=at_least) as worker:
        while worker.mutants < at_least:
            worker.one_room()
        return worker.mutants, worker.refused


def decoder_mutants(codec: Codec[Any], count: int) -> int:
    """Decode so many mutants of messages of all kinds; how many were refused."""
    chance = random.Random(count)
    mutator = Mutator(chance)
    valid = [encode(message) for message in [*ENGINE_MESSAGES, *TRANSFER_MESSAGES]]
    refused = 0
    for _ in range(count):
        mutant = mutator.mutate(chance.choice(valid))
        try:
            message = codec.decode(mutant)
        except ProtocolError:
            refused += 1
        else:
            again = encode(message)  # whole: it can be said again, and is then the same
            assert encode(codec.decode(again)) == again
    return refused


@pytest.mark.parametrize("link", DECODERS)
def test_every_decoder_takes_a_whole_message_or_raises_protocol_error(link: str) -> None:
    refused = decoder_mutants(DECODERS[link], 500)
    assert 250 < refused < 500  # some are let in: the mutants are not all noise


@pytest.mark.parametrize("who", HOSTILE)
def test_mutants_among_the_messages_of_a_group(who: str) -> None:
    mutants, refused = group_mutants(HOSTILE[who], 3500)
    assert mutants // 2 < refused < mutants


def test_mutants_from_the_controller_to_a_rank(tmp_path: Path) -> None:
    mutants, refused = rank_mutants(tmp_path, 500)
    assert mutants // 2 < refused < mutants


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_mutants(tmp_path: Path) -> None:
    total = 0
    for hostile in HOSTILE.values():
        total += group_mutants(hostile, 20_000)[0]
    total += rank_mutants(tmp_path, 10_000)[0]
    for codec in DECODERS.values():
        decoder_mutants(codec, 2000)
        total += 2000
    total += asyncio.run(client_mutants(200))
    assert total > 100_000


# The server's client ------------------------------------------------------------------------------

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


def test_mutants_from_the_engine_to_the_server() -> None:
    assert asyncio.run(client_mutants(60)) > 1000

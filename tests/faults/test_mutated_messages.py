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
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from cp_shared_kv._version import __version__
from cp_shared_kv.engine import codecs
from cp_shared_kv.engine.api import EngineRefusal, GenerateRequest, Sampling
from cp_shared_kv.engine.client import ClusterClient
from cp_shared_kv.engine.codecs import FROM_SERVER, encode
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.guests import Guests
from cp_shared_kv.engine.home_link import HomeLink
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    Admitted,
    Check,
    Checked,
    DecodeStats,
    Paired,
    PrefillStats,
    ProcessDown,
    ProcessUp,
    Registered,
    StatsRequest,
    Submit,
    Tokens,
)
from cp_shared_kv.engine.satellite_messages import (
    Condemned,
    Dismissed,
    Join,
    Leave,
    Refused,
    RunOver,
    StillHere,
    Terms,
)
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.testing.engine_sockets import DECODE, DESCRIPTION, GROUP
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
    "satellite to supervisor": codecs.FROM_SATELLITE,
    "supervisor to satellite": codecs.TO_SATELLITE,
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
    refused = decoder_mutants(DECODERS[link], 1000)
    assert 500 < refused < 1000  # some are let in: the mutants are not all noise


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
    total += guest_mutants(4000) + home_mutants(4000)
    total += asyncio.run(client_mutants(200))
    assert total > 100_000


# Supervisors of two hosts -------------------------------------------------------------------------


class FakeDoor:
    """Connections of satellites, as lists. Implements `guests.Door`."""

    def __init__(self) -> None:
        self.inbox: deque[tuple[bytes, bytes]] = deque()
        self.terms: dict[bytes, Terms] = {}

    def receive(self, wait_seconds: float = 0.0) -> tuple[bytes, bytes] | None:
        return self.inbox.popleft() if self.inbox else None

    def send(self, satellite: bytes, message: codecs.ToSatellite) -> bool:
        if isinstance(message, Terms):
            self.terms[satellite] = message
        return True

    def close(self) -> None:
        pass


def example(kind: type[Any]) -> Any:
    return next(message for message in ENGINE_MESSAGES if isinstance(message, kind))


def guest_mutants(count: int) -> int:
    """One satellite says so many mutants of what it might say, with another one beside it."""
    door = FakeDoor()
    guests = Guests(
        door,
        lambda lives: msgspec.structs.replace(example(Terms), lives=lives),
        first_index=2,
        watchdog_seconds=10.0,
    )

    def says(who: bytes, *data: bytes) -> list[Any]:
        door.inbox.extend((who, one) for one in data)
        return list(guests.exchange(1.0))

    join = encode(Join(release=__version__, host="10.0.0.6", workers=1))
    says(b"quiet", join)
    quiet = ProcessUp(life=door.terms[b"quiet"].lives[0], address="tcp://10.0.0.6:4000")
    assert says(b"quiet", encode(quiet)) == [quiet]
    mutator = Mutator(random.Random(count))
    for number in range(count // 4):
        loud = f"loud {number}".encode()
        says(loud, join)
        terms = door.terms.get(loud)  # none any more when mutants have taken all names
        life = "decode-3.1" if terms is None else terms.lives[0]
        for message in (
            Join(release=__version__, host="10.0.0.7", workers=2),
            ProcessUp(life=life, address="tcp://10.0.0.6:4001"),
            ProcessDown(life=life, reason="killed"),
            StillHere(),
        ):
            for news in says(loud, mutator.mutate(encode(message))):
                assert isinstance(news, ProcessUp | ProcessDown)
                assert news.life != quiet.life
        says(loud, encode(Leave(reason="enough")))
    assert quiet in guests.known()
    return count


class FakeSocket:
    """A link on which one message waits, or none."""

    closed = False

    def __init__(self) -> None:
        self.data: bytes | None = None

    def poll(self, timeout: int, flags: int = zmq.POLLIN) -> int:
        return flags if flags == zmq.POLLOUT or self.data is not None else 0

    def recv_multipart(self) -> list[bytes]:
        data, self.data = self.data, None
        assert data is not None
        return [data]

    def send(self, data: bytes, flags: int = 0) -> None:
        pass


def home_mutants(count: int) -> int:
    """The supervisor of a run says so many mutants to a satellite; each may end the session."""
    secret, public = zmq.curve_keypair()
    link = HomeLink("127.0.0.1:9", ControlKeys(public=public, secret=secret))
    real, fake = link._socket, FakeSocket()
    link._socket = fake  # type: ignore[assignment]
    mutator = Mutator(random.Random(count))
    kinds = (Terms, Refused, StillHere, ProcessUp, ProcessDown, Condemned, Dismissed, RunOver)
    for _ in range(count // len(kinds)):
        for kind in kinds:
            fake.data = mutator.mutate(encode(example(kind)))
            for news in link.exchange(time.monotonic()):
                assert isinstance(news, ProcessUp | ProcessDown | Condemned)
                Life.parse(news.life)  # whoever is told believes that it is one
            link._end = None
    link._socket = real
    link._socket.close(0)
    link._context.term()
    return count


def test_mutants_from_the_supervisor_to_a_satellite() -> None:
    assert home_mutants(1000) == 1000


def test_mutants_from_a_satellite_to_the_supervisor() -> None:
    assert guest_mutants(1000) == 1000


# The server's client ------------------------------------------------------------------------------


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

"""Mutants between the supervisors of two hosts, in both directions, without a network."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any

import msgspec
import zmq

from cp_shared_kv._version import __version__
from cp_shared_kv.engine import codecs
from cp_shared_kv.engine.codecs import encode
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.guests import Guests
from cp_shared_kv.engine.home_link import HomeLink
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ProcessDown, ProcessUp
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
from cp_shared_kv.testing.example_messages import ENGINE_MESSAGES
from cp_shared_kv.testing.mutations import Mutator


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

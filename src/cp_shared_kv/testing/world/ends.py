"""What the processes of a world see of each other and of the world itself."""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.testing.world.clients import Clients
from cp_shared_kv.testing.world.holders import Receiver
from cp_shared_kv.testing.world.network import Channel
from cp_shared_kv.testing.world.process import Host, Process
from cp_shared_kv.testing.world.writes import Write, Writes


class ServerEnd(Process):
    """The server as controllers and decode workers see it."""

    @abstractmethod
    def connect(self, process: Process, channel: Channel) -> None:
        """A process has a link to this server; it is known by its first message."""

    @abstractmethod
    def hear(self, sender: Life, data: bytes) -> None:
        """A message of a controller or a decode worker."""


class World(Host, Protocol):
    """What the processes of the engine need of their world."""

    @property
    def spec(self) -> RunSpec: ...
    @property
    def writes(self) -> Writes: ...
    @property
    def clients(self) -> Clients: ...
    @property
    def decode_lives(self) -> set[Life]:
        """The decode workers that are up."""
        ...

    def decode_of(self, life: Life) -> Receiver | None:
        """The decode worker of that life, while it lives."""
        ...

    def server_of(self, life: Life) -> ServerEnd | None:
        """The server of that life, while it lives."""
        ...

    def prompt_of(self, room: int) -> tuple[int, ...]:
        """The prompt whose try a room is."""
        ...

    def write_begins(self, write: Write) -> None:
        """A rank submits a write."""
        ...

    def harm(self, write: Write, how: str) -> None:
        """Something happened to a write that may cost its request the answer."""
        ...

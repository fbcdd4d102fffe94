"""A decode worker: the real engine in its process (engine/decode_process.py), without a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.child import ALIVE_SECONDS
from cp_shared_kv.engine.codecs import (
    FROM_SERVER,
)
from cp_shared_kv.engine.decode import DecodeEngine
from cp_shared_kv.engine.decode_door import DecodeDoor
from cp_shared_kv.engine.decode_room import PrefillPeer
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    Cancel,
    ProcessDown,
    ProcessUp,
    Registered,
    StatsRequest,
)
from cp_shared_kv.engine.sampling.sampler import SampledToken
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.memory.page_checksums import page_checksums
from cp_shared_kv.testing.world.answers import EOS, VOCAB_SIZE, page_numbers
from cp_shared_kv.testing.world.ends import ServerEnd, World
from cp_shared_kv.testing.world.holders import Receiver
from cp_shared_kv.testing.world.memory import NumberedPool
from cp_shared_kv.testing.world.network import Channel
from cp_shared_kv.testing.world.plan import PAGE_SIZE
from cp_shared_kv.testing.world.process import Process
from cp_shared_kv.testing.world.trace import BrokenPromise
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Concluded,
    FirstToken,
    Offer,
    Quiesced,
    Reserve,
    Sent,
    Withdrawn,
)
from cp_shared_kv.transfer.regions import Region

STEP_SECONDS = 0.005


class DecodeProcess(Receiver):
    """One life of a decode worker; it is the engine's runner as well."""

    def __init__(self, world: World, life: Life, epoch: int) -> None:
        super().__init__(world, life, str(life))
        self.world = world
        shape = world.plan.shape
        self._max_running = shape.max_running
        self.memory = NumberedPool(shape.decode_pages)
        self.pool = LogicalPool(
            world.spec.limits.decode_capacity, prefix_caching=shape.prefix_caching
        )
        self._to_groups: dict[bytes, Channel] = {}
        self._server: Channel | None = None
        self._server_life: Life | None = None
        self._ending: list[tuple[PrefillPeer, str]] = []
        """Groups that are gone, of which something may yet land."""
        self._texts: dict[int, list[int]] = {}
        """By room: the tokens whose KV is in its pages."""
        self.engine = DecodeEngine(
            self.pool,
            self,  # type: ignore[arg-type]
            epoch=epoch,
            cp_size=shape.cp_size,
            max_running=shape.max_running,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset([EOS]),
            to_server=self._to_server,
            quarantine_seconds=1000.0,
            checksums=partial(page_checksums, self.memory.pool) if shape.verify else None,
        )

        self._door = DecodeDoor(
            world.spec.hello(
                role="decode",
                epoch=epoch,
                session_id=self.name,
                physical_pages=shape.decode_pages,
                regions=(Region(f"{life}-pool", self.memory.buffer.nbytes),),
            ),
            send=self._to_group,
            is_idle=lambda: not self.engine.open_rooms,
        )

    @property
    def main(self) -> Process:
        """The process that takes the supervisor's news."""
        return self

    @property
    def processes(self) -> list[Process]:
        """All of the unit."""
        return [self]

    def unfinished(self) -> list[str]:
        """Rooms that are open."""
        rooms = self.engine.open_rooms
        told = [f"{rooms} rooms are open"] if rooms else []
        return told + self.engine.problems(self.world.clock.now_seconds)

    def connect(self, identity: bytes, channel: Channel) -> None:
        """A controller or a rank has a link to this door."""
        self._to_groups[identity] = channel

    def handle(self, sender: bytes, data: bytes) -> None:
        """One message of a controller or a rank, as `sender` on the link."""
        admitted = self._door.admit(sender, data)
        if admitted is None:
            return
        peer, message = admitted
        match message:
            case Offer():
                self.engine.on_offer(peer, message)
            case Sent() | Concluded() | Quiesced():
                self.engine.on_transfer(peer, message)
            case FirstToken():
                self.engine.on_first_token(peer, message)
            case AbortRoom() | Withdrawn():
                self.engine.on_stop(peer, message)
            case _:
                raise ProtocolError("only a replay sends this", value=type(message).__name__)

    def on_news(self, news: ProcessUp | ProcessDown) -> None:
        """The supervisor on the server and on prefill groups."""
        life = Life.parse(news.life)
        match news:
            case ProcessUp() if life.role == "server":
                self._server_up(life)
            case ProcessDown() if life == self._server_life:
                self.engine.server_lost(news.reason)
            case ProcessDown() if life.role == "prefill":
                peer = self._door.lost(life)
                if peer is not None:
                    self._ending.append((peer, news.reason))
                    self._let_go()
            case _:
                pass

    def _let_go(self) -> None:
        if self._ending and self.world.writes.are_settled(self):
            for peer, reason in self._ending:
                self.engine.peer_dead(peer, reason)
            self._ending.clear()
        elif self._ending:
            self.world.clock.after(ALIVE_SECONDS, lambda: self.take(self._let_go))

    def after_each(self) -> None:
        """One step after another while there is anything to generate."""
        if self.engine.has_work and not self.busy:
            self.begin(self.world.weather.short_seconds(STEP_SECONDS), self._step)

    def _step(self) -> None:
        if self.engine.has_work:
            self.engine.step()

    def execute(
        self, batch: Batch, sampling: Mapping[int, SamplingState]
    ) -> dict[int, SampledToken]:
        """A forward pass: it may begin only on pages that have all arrived and are left alone."""
        batch.validate(
            page_size=PAGE_SIZE, logical_pages=self.pool.total_pages, vocab_size=VOCAB_SIZE
        )
        if not 0 < len(batch.requests) <= self._max_running:
            raise BrokenPromise(f"{self.name} runs {len(batch.requests)} requests at once")
        written = {
            page
            for write in self.world.writes.all()
            if write.decode is self
            for page in write.destinations
        }
        tokens = batch.tokens().tolist()
        for part, token in zip(batch.requests, tokens, strict=True):
            text = self._texts.setdefault(part.room, list(self.world.prompt_of(part.room)))
            pages = part.pages().tolist()
            if part.prefix_tokens != len(text) or sampling[part.room].position != 1 + len(
                text
            ) - len(self.world.prompt_of(part.room)):
                raise BrokenPromise(f"{self.name} has miscounted room {part.room}")
            numbers = page_numbers(text, PAGE_SIZE)
            wrong = self.memory.wrong(pages[: len(numbers)], numbers)
            if wrong is not None:
                raise BrokenPromise(
                    f"{self.name} reads page {pages[wrong]} as position {wrong} of room "
                    f"{part.room}, and it holds something else"
                )
            if not written.isdisjoint(pages):
                raise BrokenPromise(
                    f"{self.name} runs room {part.room} while a write to its pages "
                    f"{sorted(written.intersection(pages))} can land"
                )
            text.append(token)
            last = page_numbers(text, PAGE_SIZE)[-1]
            self.memory.fill(pages[-1:], [last])
        return {
            part.room: SampledToken(token + 1)
            for part, token in zip(batch.requests, tokens, strict=True)
        }

    def check_books(self) -> None:
        """Rooms, sessions, pool and radix tree."""
        self.engine.check_invariants()

    def _server_up(self, life: Life) -> None:
        server = self.world.server_of(life)
        if server is None:
            return
        self._server = Channel(self.world, self, server, lambda data: server.hear(self.life, data))
        self._server_life = life
        answers = Channel(self.world, server, self, lambda data: self._from_server(server, data))
        server.connect(self, answers)
        self._to_server(Registered())

    def _from_server(self, server: ServerEnd, data: bytes) -> None:
        if server.life != self._server_life:
            return  # that link has been closed
        message = FROM_SERVER.decode(data)
        match message:
            case StatsRequest():
                self._to_server(self.engine.stats(message.ticket))
            case Cancel():
                self.engine.cancel(message.room, "the client went away")
            case _:
                raise ProtocolError("not a message for decode", value=type(message).__name__)

    def _to_server(self, message: msgspec.Struct) -> None:
        self.world.clients.hear(message)
        if self._server is not None:
            self._server.send(message)

    def _to_group(self, identity: bytes, message: msgspec.Struct) -> None:
        if isinstance(message, Reserve):
            self.world.seen["prefix held by decode"] += message.first_position > 0
        channel = self._to_groups.get(identity)
        if channel is not None:  # a ROUTER drops what is for nobody
            channel.send(message)

"""A prefill group: the real controller in its process (engine/prefill_process.py), and N ranks."""

from __future__ import annotations

import msgspec

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.codecs import (
    DECODE_TO_CONTROLLER,
    FROM_RANK,
    FROM_SERVER,
)
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    BatchDone,
    DecodeConnected,
    DisconnectDecode,
    ProcessDown,
    ProcessUp,
    RankState,
    RoomConcluded,
)
from cp_shared_kv.engine.pairing import DecodePeer, Pairing
from cp_shared_kv.engine.prefill import PrefillController
from cp_shared_kv.engine.request import PrefillRequest
from cp_shared_kv.errors import InvariantError, ProtocolError
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.testing.world.answers import page_numbers
from cp_shared_kv.testing.world.ends import ServerEnd, World
from cp_shared_kv.testing.world.network import Channel
from cp_shared_kv.testing.world.plan import PAGE_SIZE
from cp_shared_kv.testing.world.process import Process, SiblingGoneError
from cp_shared_kv.testing.world.rank import RankProcess
from cp_shared_kv.testing.world.trace import BrokenPromise
from cp_shared_kv.transfer.messages import AbortRoom, Declined, Released, Reserve
from cp_shared_kv.transfer.rendezvous import read_hello

BATCH_SECONDS = 0.02


class ControllerProcess(Process):
    """The controller between its links: supervisor, server, ranks and decode workers."""

    def __init__(self, world: World, life: Life, epoch: int) -> None:
        super().__init__(world, life, str(life))
        self.world, self._epoch = world, epoch
        self._server: Channel | None = None
        self._server_life: Life | None = None
        self._links: dict[Life, Channel] = {}
        self._pairings: dict[Life, Pairing] = {}
        self._peers: dict[Life, DecodePeer] = {}
        self.ranks: list[tuple[RankProcess, Channel]] = []
        self.controller = PrefillController(
            world.spec, epoch=epoch, to_server=self._to_server, to_ranks=self._to_ranks
        )

    def on_news(self, news: ProcessUp | ProcessDown) -> None:
        """The supervisor on the server and on decode workers."""
        life = Life.parse(news.life)
        match news:
            case ProcessUp() if life.role == "decode":
                self._decode_up(life, news.address)
            case ProcessUp() if life.role == "server":
                self._server_up(life)
            case ProcessDown() if life.role == "decode":
                self._decode_down(life, news.reason)
            case ProcessDown() if life == self._server_life:
                self.controller.server_lost(news.reason)
            case _:
                pass

    def from_rank(self, data: bytes) -> None:
        """A rank speaks."""
        message = FROM_RANK.decode(data)
        match message:
            case BatchDone() | RoomConcluded() | RankState():
                self.controller.on_rank(message)
            case DecodeConnected():
                self._mapped(message)
            case _:
                raise ProtocolError("a rank says what it never says", value=type(message).__name__)

    @property
    def pool(self) -> LogicalPool:
        """The group's logical pages."""
        return self.controller.scheduler.pool

    @property
    def paired_with(self) -> set[Life]:
        """The decode workers that it can send to."""
        return set(self._peers)

    def requests(self) -> list[PrefillRequest]:
        """All that the scheduler has."""
        return list(self.controller.scheduler.requests())

    def after_each(self) -> None:
        """A batch begins whenever one can."""
        self.controller.step()

    def check_books(self) -> None:
        """Scheduler, pool and radix tree."""
        self.controller.scheduler.check_invariants()

    def _to_ranks(self, message: msgspec.Struct) -> None:
        for rank, channel in self.ranks:
            if not rank.alive:
                raise SiblingGoneError(f"{rank.name} is gone")
            channel.send(message)

    def _to_server(self, message: msgspec.Struct) -> None:
        self.world.clients.hear(message)
        if self._server is not None:
            self._server.send(message)

    def _server_up(self, life: Life) -> None:
        server = self.world.server_of(life)
        if server is None:
            return  # a dealer to an address where nobody is any more
        self._server = Channel(self.world, self, server, lambda data: server.hear(self.life, data))
        self._server_life = life
        answers = Channel(self.world, server, self, lambda data: self._from_server(server, data))
        server.connect(self, answers)
        self.controller.introduce()

    def _from_server(self, server: ServerEnd, data: bytes) -> None:
        if server.life == self._server_life:  # else that link has been closed
            self.controller.on_server(FROM_SERVER.decode(data))

    def _decode_up(self, life: Life, address: str) -> None:
        decode = self.world.decode_of(life)
        if life in self._links or decode is None:
            return
        link = Channel(
            self.world, self, decode, lambda data: decode.handle(self.life.identity, data)
        )
        answers = Channel(self.world, decode, self, lambda data: self._from_decode(life, data))
        decode.connect(self.life.identity, answers)
        self._links[life] = link
        self._pairings[life] = Pairing(
            self.world.spec.hello(
                role="prefill",
                epoch=self._epoch,
                session_id=str(self.life),
                physical_pages=self.world.plan.shape.physical_pages,
            ),
            life,
            address,
            cp_size=self.world.plan.shape.cp_size,
            send=link.send,
            to_ranks=self._to_ranks,
        )

    def _decode_down(self, life: Life, reason: str) -> None:
        pairing = self._pairings.pop(life, None)
        self._links.pop(life, None)
        if self._peers.pop(life, None) is not None:
            self.controller.decode_lost(life, reason)
        elif pairing is not None and pairing.epoch is not None:
            self._to_ranks(DisconnectDecode(decode_epoch=pairing.epoch, reason=reason))

    def _mapped(self, message: DecodeConnected) -> None:
        for life, pairing in list(self._pairings.items()):
            if pairing.epoch != message.decode_epoch:
                continue
            peer = pairing.mapped(message)
            if peer is not None:
                del self._pairings[life]
                self._peers[life] = peer
                self.controller.paired(peer)

    def _from_decode(self, life: Life, data: bytes) -> None:
        if life not in self._links:
            return  # the link has been closed
        pairing = self._pairings.get(life)
        if pairing is not None and pairing.epoch is None:
            pairing.greeted(read_hello(data, pairing.mine))
            return
        message = DECODE_TO_CONTROLLER.decode(data)
        peer = self._peers.get(life)
        if peer is None or not isinstance(message, Reserve | Declined | Released | AbortRoom):
            raise ProtocolError("a message before the pair stands", value=str(life))
        self.controller.on_decode(peer, message)


class PrefillUnit:
    """One life of a group. Its ranks enter each batch together, as their collectives make them."""

    def __init__(self, world: World, life: Life, epoch: int) -> None:
        self.world, self.life = world, life
        self.controller = ControllerProcess(world, life, epoch)
        self.ranks = [
            RankProcess(
                world,
                life,
                rank,
                epoch,
                self.controller,
                to_controller=self.controller.from_rank,
                enter=self._enter,
            )
            for rank in range(world.plan.shape.cp_size)
        ]
        self.controller.ranks = [
            (rank, Channel(world, self.controller, rank, rank.handle)) for rank in self.ranks
        ]
        self._entered: list[tuple[RankProcess, Batch]] = []

    def unfinished(self) -> list[str]:
        """Rooms that are open somewhere in the group."""
        rooms = [f"room {r.room} is {r.stage.value}" for r in self.controller.requests()]
        for rank in self.ranks:
            rooms += [f"rank {rank.rank} has room {room} open" for room in rank.sender.open_rooms]
            rooms += [f"to rank {rank.rank} {decode}" for decode in rank.peers.unsettled]
        lives = self.controller.paired_with
        rooms += [f"it is not paired with {life}" for life in self.world.decode_lives - lives]
        return rooms + self.controller.controller.problems()

    @property
    def main(self) -> Process:
        """The process that takes the supervisor's news."""
        return self.controller

    @property
    def processes(self) -> list[Process]:
        """All of the unit."""
        return [self.controller, *self.ranks]

    def _enter(self, rank: RankProcess, batch: Batch) -> None:
        """A rank begins a batch; it ends for nobody before all have begun."""
        self._entered.append((rank, batch))
        if len(self._entered) < len(self.ranks):
            return
        entered, self._entered = self._entered, []
        if any(other != batch for _, other in entered):
            raise InvariantError("ranks compute different batches", value=batch.batch_id)
        self._check_prefixes(batch)
        seconds = self.world.weather.short_seconds(BATCH_SECONDS)
        for one, _ in entered:
            self._compute(one, batch, seconds + self.world.weather.short_seconds(0.001))

    def _compute(self, rank: RankProcess, batch: Batch, seconds: float) -> None:
        rank.begin(seconds, lambda: rank.computed(batch))

    def _check_prefixes(self, batch: Batch) -> None:
        """All ranks read the prefixes, wherever their pages lie."""
        shape = self.world.plan.shape
        batch.validate(
            page_size=PAGE_SIZE,
            logical_pages=shape.physical_pages * shape.cp_size,
            vocab_size=self.world.spec.vocab_size,
        )
        for part in batch.requests:
            prompt = self.world.prompt_of(part.room)
            numbers = page_numbers(prompt[: part.prefix_tokens], PAGE_SIZE)
            pages = LogicalPages(part.pages()[: len(numbers)])
            owners = self.ranks[0].layout.owner_for_logical_pages(pages).tolist()
            physical = self.ranks[0].layout.logical_pages_to_physical(pages).tolist()
            for position, (owner, page) in enumerate(zip(owners, physical, strict=True)):
                if self.ranks[owner].memory.wrong([page], [numbers[position]]) is not None:
                    raise BrokenPromise(
                        f"{self.life} reads page {pages[position]} as position {position} of room "
                        f"{part.room}, and it holds something else"
                    )

"""A prefill group and a decode engine without processes, whose links also carry mutants.

Controller, decode engine, decode's door and the ranks' transfer senders are the real ones. Every
message travels encoded; beside many of them a mutant arrives, before or after. What a receiver
refuses is dropped, as its process does. Anything but a ProtocolError is the test's failure.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.codecs import (
    DECODE_TO_CONTROLLER,
    DECODE_TO_RANK,
    FROM_RANK,
    FROM_SERVER,
    TO_RANK,
    TO_SERVER,
    encode,
)
from cp_shared_kv.engine.decode import DecodeEngine
from cp_shared_kv.engine.decode_door import DecodeDoor
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    BatchDone,
    Cancel,
    Check,
    Flush,
    PageMapRequest,
    RankState,
    RoomConcluded,
    StatsRequest,
)
from cp_shared_kv.engine.pairing import DecodePeer
from cp_shared_kv.engine.prefill import PrefillController
from cp_shared_kv.engine.sampling.sampler import SampledToken
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.memory.page_checksums import page_checksums
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.testing.hostile_plan import hostile_run_spec, random_request
from cp_shared_kv.testing.hostile_rank import CP_SIZE, PAGE_SIZE, POOL, VOCAB_SIZE, HostileRank
from cp_shared_kv.testing.mutations import Mutator
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Concluded,
    Declined,
    FirstToken,
    Hello,
    Offer,
    Quiesced,
    Released,
    Reserve,
    Sent,
    Withdrawn,
)
from cp_shared_kv.transfer.regions import Region

EPOCH, DECODE_EPOCH = 100, 200
GROUP, DECODE = Life("prefill", 0, 1), Life("decode", 0, 1)
EOS = 14
MOST_REQUESTS = 8
RANKS = range(CP_SIZE)
Link = tuple[str, str]
SERVER_LINKS: frozenset[Link] = frozenset({("server", "controller"), ("server", "decode")})
TO_RANKS: frozenset[Link] = frozenset(("decode", f"rank {rank}") for rank in RANKS)
FROM_RANKS: frozenset[Link] = frozenset(
    (f"rank {rank}", end) for rank in RANKS for end in ("decode", "controller")
)
PAIR: frozenset[Link] = frozenset({("controller", "decode"), ("decode", "controller")})


class HostileGroup:
    """One group of two ranks and one decode worker. `hostile` are the links that carry mutants;
    all else follows from the seed.

    `run` works for a while, `settle` brings everything to its end and checks that every page is
    back. The books are checked after every mutant.
    """

    def __init__(self, seed: int, hostile: frozenset[Link]) -> None:
        self._chance = random.Random(f"hostile {seed}")  # noqa: S311  (repeatable)
        self._mutator = Mutator(self._chance)
        self._hostile = hostile
        self._pair_is_honest = hostile <= SERVER_LINKS | TO_RANKS
        self._links: dict[Link, deque[tuple[bytes, bool]]] = {}
        self.mutants = 0
        self.refused = 0
        chance = self._chance
        physical_pages, decode_pages = chance.randint(3, 6), chance.randint(6, 16)
        verify = chance.random() < 0.3
        self._spec = hostile_run_spec(
            physical_pages, decode_pages, chance.randint(2, 16), eos=EOS, verify=verify
        )
        self._controller = PrefillController(
            self._spec,
            epoch=EPOCH,
            to_server=lambda m: self._put("controller", "server", m),
            to_ranks=self._to_ranks,
        )
        self._pool = self._controller.scheduler.pool
        self._decode_pool = LogicalPool(
            KVCapacity(decode_pages, PAGE_SIZE, 1), prefix_caching=chance.random() < 0.5
        )
        # No page's bytes ever change, so those of an empty pool are those that were sent.
        empty = KVPool(POOL, decode_pages, PrivateBuffer(POOL.pool_bytes(decode_pages)))
        self._decode = DecodeEngine(
            self._decode_pool,
            self,  # type: ignore[arg-type]
            epoch=DECODE_EPOCH,
            cp_size=CP_SIZE,
            max_running=3,
            quarantine_seconds=30.0,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset([EOS]),
            to_server=lambda m: self._put("decode", "server", m),
            checksums=partial(page_checksums, empty) if verify else None,
        )
        hello = self._hello("decode")
        self._door = DecodeDoor(
            hello,
            send=self._from_decode,
            is_idle=lambda: not self._decode.open_rooms,
        )
        self._ranks = [
            HostileRank(
                rank,
                epoch=EPOCH,
                physical_pages=physical_pages,
                decode=hello,
                verify=verify,
                put=partial(self._put, f"rank {rank}"),
            )
            for rank in RANKS
        ]
        self._put("controller", "decode", self._hello("prefill"))
        self._move_all()
        self._peer = DecodePeer(
            DECODE, DECODE_EPOCH, send=lambda m: self._put("controller", "decode", m)
        )
        self._controller.paired(self._peer)
        self._rooms: list[int] = []

    # Links ------------------------------------------------------------------------------------

    def _put(self, sender: str, receiver: str, message: msgspec.Struct) -> None:
        data = encode(message)
        if receiver == "server":
            TO_SERVER.decode(data)
            return
        link = self._links.setdefault((sender, receiver), deque())
        self._mutator.saw(data)
        mutants: list[bytes] = []
        if (sender, receiver) in self._hostile and self._chance.random() < 0.7:
            mutants = [self._mutator.mutate(data) for _ in range(self._chance.choice((1, 1, 3)))]
        before = self._chance.randint(0, len(mutants))
        link.extend((mutant, True) for mutant in mutants[:before])
        link.append((data, False))
        link.extend((mutant, True) for mutant in mutants[before:])

    def _to_ranks(self, message: msgspec.Struct) -> None:
        for rank in RANKS:
            self._put("controller", f"rank {rank}", message)

    def _from_decode(self, identity: bytes, message: msgspec.Struct) -> None:
        names = {GROUP.identity: "controller"} | {
            GROUP.rank_identity(rank): f"rank {rank}" for rank in RANKS
        }
        if identity in names:  # zmq drops what is for nobody
            self._put("decode", names[identity], message)

    def _move(self, link: Link) -> None:
        data, is_mutant = self._links[link].popleft()
        try:
            self._receive(*link, data)
        except ProtocolError:
            assert is_mutant or self.mutants, "a message was refused, and nobody has lied"
            self.refused += is_mutant
        if is_mutant:
            self.mutants += 1
            self._check_books()

    def _receive(self, sender: str, receiver: str, data: bytes) -> None:
        match sender, receiver:
            case "server", "decode":
                self._server_to_decode(data)
            case "server", "controller":
                self._controller.on_server(FROM_SERVER.decode(data))
            case "decode", "controller":
                self._decode_to_controller(data)
            case _, "controller":
                self._rank_to_controller(sender, data)
            case _, "decode":
                self._to_decode(sender, data)
            case "controller", _:
                self._ranks[int(receiver[-1])].obey(TO_RANK.decode(data))
            case _:
                self._ranks[int(receiver[-1])].hear(DECODE_TO_RANK.decode(data))

    def _server_to_decode(self, data: bytes) -> None:
        message = FROM_SERVER.decode(data)
        match message:
            case StatsRequest():
                self._put("decode", "server", self._decode.stats(message.ticket))
            case Cancel():
                self._decode.cancel(message.room, "the client went away")
            case _:
                raise ProtocolError("not a message for decode", value=type(message).__name__)

    def _decode_to_controller(self, data: bytes) -> None:
        message = DECODE_TO_CONTROLLER.decode(data)
        if isinstance(message, Reserve | Declined | Released | AbortRoom):
            self._controller.on_decode(self._peer, message)

    def _rank_to_controller(self, sender: str, data: bytes) -> None:
        message = FROM_RANK.decode(data)
        if sender != f"rank {message.rank}":
            raise ProtocolError("in another rank's name", value=message.rank)
        if isinstance(message, BatchDone | RoomConcluded | RankState):
            self._controller.on_rank(message)

    def _to_decode(self, sender: str, data: bytes) -> None:
        identity = GROUP.identity
        if sender != "controller":
            identity = GROUP.rank_identity(int(sender[-1]))
        admitted = self._door.admit(identity, data)
        if admitted is None:
            return
        peer, message = admitted
        match message:
            case Offer():
                self._decode.on_offer(peer, message)
            case FirstToken():
                self._decode.on_first_token(peer, message)
            case AbortRoom() | Withdrawn():
                self._decode.on_stop(peer, message)
            case Sent() | Concluded() | Quiesced():
                self._decode.on_transfer(peer, message)
            case _:
                raise ProtocolError("only a replay sends this", value=type(message).__name__)

    # Work -------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Clients, links, steps and writes in an order that the seed decides."""
        acts: list[tuple[int, Callable[[], None]]] = [
            (2, self._submit),
            (1, self._cancel),
            (1, self._ask),
            (12, self._move_some),
            (4, self._step),
            (3, self._end_a_write),
            (1, self._look_after_transfers),
        ]
        weights = [weight for weight, _ in acts]
        for _ in range(steps):
            self._chance.choices(acts, weights)[0][1]()

    def _submit(self) -> None:
        if len(self._rooms) < MOST_REQUESTS:
            self._rooms.append(len(self._rooms) + 1)
            submit = random_request(self._chance, self._rooms[-1], str(DECODE))
            self._put("server", "controller", submit)

    def _cancel(self) -> None:
        if self._rooms and self._chance.random() < 0.3:
            room = self._chance.choice(self._rooms)
            for end in ("controller", "decode"):
                self._put("server", end, Cancel(room=room))

    def _ask(self) -> None:
        question = self._chance.choice(
            (
                StatsRequest(ticket=1),
                Flush(ticket=2),
                Check(ticket=3),
                PageMapRequest(ticket=5, most_bins=4),
            )
        )
        self._put("server", "controller", question)
        self._put("server", "decode", StatsRequest(ticket=4))

    def _move_some(self) -> None:
        waiting = [link for link, queue in self._links.items() if queue]
        if waiting:
            link = self._chance.choice(waiting)
            for _ in range(min(len(self._links[link]), self._chance.randint(1, 6))):
                self._move(link)

    def _move_all(self) -> None:
        for link, queue in list(self._links.items()):
            for _ in range(len(queue)):
                self._move(link)

    def _step(self) -> None:
        self._controller.step()
        if self._decode.has_work:
            self._decode.step()

    def _end_a_write(self) -> None:
        writes = [(rank, write) for rank in self._ranks for write in rank.writes]
        if not writes:
            return
        rank, write = self._chance.choice(writes)
        if write.stray or self._chance.random() < 0.9:
            self._check_destination(write.room, write.pages)
            rank.land(write)
        else:
            rank.fail(write, quiescent=self._chance.random() < 0.5)

    def _look_after_transfers(self) -> None:
        for rank in self._ranks:
            rank.look_after_transfers()

    def execute(self, batch: Batch, sampling: dict[int, SamplingState]) -> dict[int, SampledToken]:
        """The decode engine's runner: the batch must be one that a model could run."""
        batch.validate(
            page_size=PAGE_SIZE,
            logical_pages=self._decode_pool.total_pages,
            vocab_size=VOCAB_SIZE,
        )
        for part in batch.requests:
            held = self._decode_pool.pages(part.room).tolist()
            assert part.pages().tolist() == held[: len(part.pages())]
            assert sampling[part.room].position > 0
        tokens = batch.tokens().tolist()
        return {
            part.room: SampledToken((token + 1) % VOCAB_SIZE)
            for part, token in zip(batch.requests, tokens, strict=True)
        }

    # Checks -----------------------------------------------------------------------------------

    def _check_books(self) -> None:
        self._controller.scheduler.check_invariants()
        self._decode.check_invariants()
        for rank in self._ranks:
            rank.sender.check_invariants()

    def _check_destination(self, room: int, pages: set[int]) -> None:
        """Where neither end of the pair lies, a write lands in pages that decode keeps for it."""
        if self._pair_is_honest:
            held = set(self._decode_pool.pages(room).tolist())
            assert pages <= held, f"room {room} has {held}, and {pages} are written"

    def settle(self) -> None:
        """No more mutants. Clients and server go, then both ends learn that the other is dead."""
        self._hostile = frozenset[Link]()
        self._move_all()
        for end in (self._controller, self._decode):
            end.server_lost("the test is over")
        for _ in range(60):
            self._move_all()
            self._step()
            while any(rank.writes for rank in self._ranks):
                self._end_a_write()
                self._look_after_transfers()
            self._look_after_transfers()
        self._check_books()
        self._controller.decode_lost(DECODE, "decode is gone")
        peer = self._door.lost(GROUP)
        assert peer is not None
        self._decode.peer_dead(peer, "the group is gone")
        for _ in range(3):
            self._move_all()
        self._check_books()
        assert self._controller.scheduler.in_flight is None
        assert not list(self._controller.scheduler.requests())
        assert self._pool.locked_pages == 0
        assert self._decode.open_rooms == 0
        assert self._decode_pool.locked_pages == 0
        assert not any(rank.sender.open_rooms for rank in self._ranks)

    def _hello(self, role: Literal["prefill", "decode"]) -> Hello:
        pages = self._decode_pool.total_pages
        region = Region("decode-pool", POOL.pool_bytes(pages))
        return self._spec.hello(
            role=role,
            epoch=EPOCH if role == "prefill" else DECODE_EPOCH,
            session_id=role,
            physical_pages=pages,
            regions=(region,) if role == "decode" else (),
        )

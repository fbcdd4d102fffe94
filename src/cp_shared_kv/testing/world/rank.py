"""A CP rank without a model: the real sender over pages that hold numbers (engine/worker.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.codecs import DECODE_TO_RANK, TO_RANK, RankToDecode
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    BatchDone,
    ConnectDecode,
    DecodeConnected,
    DisconnectDecode,
    RankState,
    RoomToken,
)
from cp_shared_kv.engine.transfer_peers import TransferPeers
from cp_shared_kv.engine.transfer_sender import TransferSender
from cp_shared_kv.engine.worker import RESEND_SECONDS
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages, Positions
from cp_shared_kv.testing.world.answers import first_token, page_numbers
from cp_shared_kv.testing.world.ends import World
from cp_shared_kv.testing.world.holders import Holder
from cp_shared_kv.testing.world.memory import NumberedPool
from cp_shared_kv.testing.world.network import Channel
from cp_shared_kv.testing.world.plan import PAGE_SIZE
from cp_shared_kv.testing.world.process import Process
from cp_shared_kv.testing.world.side_calls import VirtualThreads
from cp_shared_kv.testing.world.transport import SimulatedTransport
from cp_shared_kv.testing.world.writes import Write
from cp_shared_kv.transfer.messages import AbortRoom, OpenRoom


class RankProcess(Holder):
    """One rank of one life of a group. `handle` takes the controller's messages in order.

    `enter` is called with each batch; when all ranks have, each one's `computed` follows.
    """

    def __init__(
        self,
        world: World,
        life: Life,
        rank: int,
        epoch: int,
        controller: Process,
        *,
        to_controller: Callable[[bytes], None],
        enter: Callable[[RankProcess, Batch], None],
    ) -> None:
        super().__init__(world, life, f"{life}/rank-{rank}")
        self.world, self.rank = world, rank
        self._enter = enter
        shape = world.plan.shape
        self.memory = NumberedPool(shape.physical_pages)
        self.layout = CpSharedKVLayout(
            PAGE_SIZE, shape.cp_size, rank, physical_pages=shape.physical_pages
        )
        self.transport = SimulatedTransport(world, self)
        self._to_decodes: dict[int, Channel] = {}
        self._to_controller = Channel(world, self, controller, to_controller)
        self.peers = TransferPeers(
            self.transport,
            VirtualThreads(world, self),
            wake=lambda: self.take(self.sender.collect),
        )
        self.sender = TransferSender(
            self.layout,
            self.memory.pool,
            self.peers,
            rank=rank,
            epoch=epoch,
            sends_nothing=False,
            verify=shape.verify,
            to_decode=self._say,
            to_controller=self._to_controller.send,
        )
        self._look_after_transfers()

    def handle(self, data: bytes) -> None:
        """Obey one message of the controller."""
        message = TO_RANK.decode(data)
        match message:
            case ConnectDecode():
                self.sender.connect(message.hello, partial(self._connected, message))
            case DisconnectDecode():
                self.world.seen["worker lost while it was being connected"] += (
                    message.decode_epoch not in self._to_decodes
                )
                self.sender.decode_dead(message.decode_epoch, message.reason)
                self._to_decodes.pop(message.decode_epoch, None)
            case OpenRoom():
                self.sender.open(message)
            case Batch():
                self.busy = True
                self._enter(self, message)
            case AbortRoom():
                self.sender.abort(message)
            case _:
                raise ProtocolError("not a message for a rank", value=type(message).__name__)

    def computed(self, batch: Batch) -> None:
        """The forward pass is over: the pages that this rank owns are written, and sent."""
        tokens: list[RoomToken] = []
        for part in batch.requests:
            prompt = self.world.prompt_of(part.room)
            stop = part.prefix_tokens + part.new_tokens
            first = part.prefix_tokens // PAGE_SIZE
            pages = part.pages()[first:]
            numbers = page_numbers(prompt[:stop], PAGE_SIZE)[first:]
            owned, positions = self.layout.filter_owned_pages(
                LogicalPages(pages), Positions(np.arange(len(pages)))
            )
            if len(owned):
                self.memory.fill(owned.tolist(), [numbers[p] for p in positions.tolist()])
            if part.last and part.room % self.layout.cp_size == self.rank:
                tokens.append(RoomToken(room=part.room, token_id=first_token(prompt)))
        self._to_controller.send(
            BatchDone(rank=self.rank, batch_id=batch.batch_id, tokens=tokens, scratch_bytes=0)
        )
        for part in batch.requests:
            self.transport.room = part.room
            self.sender.send_chunk(part)

    def die(self) -> None:
        """Of the writes under way a part may still land, until the process is reaped."""
        if self.alive:
            super().die()
            for write in self.world.writes.of_rank(self):
                self.world.clock.after(
                    self.world.weather.short_seconds(0.1), partial(self._last_bytes, write)
                )

    def _last_bytes(self, write: Write) -> None:
        if write in self.world.writes:
            landed = write.land(self.world.rng.random())
            self.world.seen["bytes of the dead landed"] += landed

    def check_books(self) -> None:
        """The sessions' books."""
        self.sender.check_invariants()

    def _connected(self, message: ConnectDecode, failure: str | None) -> None:
        epoch = message.hello.epoch
        decode = self.world.decode_of(Life.parse(message.hello.session_id))
        if failure is None and decode is not None:
            identity = self.life.rank_identity(self.rank)
            self._to_decodes[epoch] = Channel(
                self.world, self, decode, lambda data: decode.handle(identity, data), reliable=False
            )
            answers = Channel(
                self.world,
                decode,
                self,
                lambda data: self.sender.on_decode(DECODE_TO_RANK.decode(data)),
                reliable=False,
            )
            decode.connect(identity, answers)
        self._to_controller.send(
            DecodeConnected(rank=self.rank, decode_epoch=epoch, failure=failure)
        )

    def _say(self, message: RankToDecode) -> None:
        link = self._to_decodes.get(message.peer_epoch)
        if link is not None:
            link.send(message)

    def _look_after_transfers(self) -> None:
        self.world.clock.after(RESEND_SECONDS, lambda: self.take(self._look))

    def _look(self) -> None:
        self.sender.resend()
        self._to_controller.send(
            RankState(rank=self.rank, open_rooms=self.sender.open_rooms, problem=None)
        )
        self._look_after_transfers()

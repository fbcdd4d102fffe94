"""A rank's side of all its transfers: sessions, transport and the link to decode."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import numpy as np

from cp_shared_kv.engine.batch import BatchRequest
from cp_shared_kv.engine.messages import RoomConcluded
from cp_shared_kv.errors import ProtocolError, TransferError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages, Positions
from cp_shared_kv.memory.page_checksums import page_checksums
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.transfer.actions import PrefillAction, ReleaseSources, SendMessage, SubmitWrite
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.descriptors import PageAreas, expand, merge_pages
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Acknowledged,
    Concluded,
    Hello,
    OpenRoom,
    Quiesced,
    Sent,
)
from cp_shared_kv.transfer.prefill_session import PrefillSession, PrefillState
from cp_shared_kv.transfer.transport import KVTransport, PeerInfo

NO_PAGES = PhysicalPages(np.zeros(0, dtype=np.int64))
NO_POSITIONS = Positions(np.zeros(0, dtype=np.int64))
Send = Callable[[msgspec.Struct], None]

logger = logging.getLogger("cp_shared_kv")


@dataclass(eq=False)
class _Decode:
    """A decode worker that this rank can write to."""

    hello: Hello
    areas: PageAreas
    unreachable: str | None = None
    """How a write to it failed: nothing is written until the transport has found it again."""
    dead: bool = False


@dataclass(eq=False)
class _Room:
    decode: _Decode
    session: PrefillSession
    pages: int = 0
    descriptors: int = 0
    nbytes: int = 0


@dataclass(frozen=True, eq=False)
class _Write:
    """A chunk on its way to decode."""

    name: int
    room: _Room
    chunk: int
    source_physical_pages: PhysicalPages
    descriptors: int
    landed: Future[int]


class TransferSender:
    """Sends the pages that this rank owns. `to_decode`, `to_controller` put messages on links.

    A write takes as long as it takes: nothing here waits for it. `wake` is called when one has
    ended, from any thread; then call `collect`.

    `sends_nothing` is for the ranks of a replicated group that hold copies of what rank 0 sends:
    they conclude every room with zero pages. `verify` sends a checksum with each page.
    """

    def __init__(
        self,
        layout: CpSharedKVLayout,
        pool: KVPool,
        transport: KVTransport,
        *,
        rank: int,
        epoch: int,
        sends_nothing: bool,
        verify: bool,
        to_decode: Callable[[Sent | Concluded | Quiesced], None],
        to_controller: Send,
        wake: Callable[[], None],
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._transport = transport
        self._region = transport.register(pool.buffer)
        self._rank = rank
        self._epoch = epoch
        self._sends_nothing = sends_nothing
        self._verify = verify
        self._to_decode = to_decode
        self._to_controller = to_controller
        self._wake = wake
        self._rooms: dict[int, _Room] = {}
        self._decodes: dict[int, _Decode] = {}
        """By epoch: those that live, and dead ones that the transport has not let go."""
        self._writes: list[_Write] = []

    def connect(self, decode: Hello) -> None:
        """Map the pool of a decode worker that the controller has shaken hands with.

        TransferError if it cannot be reached.
        """
        self._transport.connect(PeerInfo(decode.session_id, decode.regions))
        areas = PageAreas.between(self._pool.spec, self._pool.physical_pages, decode.physical_pages)
        self._decodes[decode.epoch] = _Decode(decode, areas)

    def decode_dead(self, decode_epoch: int, reason: str) -> None:
        """A decode worker's process is gone: its rooms end, and its memory is unmapped."""
        decode = self._decodes.get(decode_epoch)
        if decode is None or decode.dead:
            return
        decode.dead = True
        for name, room in self._rooms_of(decode):
            self._carry_out(name, room.session.peer_dead(reason))
        self._let_go(decode)

    def unreachable(self, decode_epoch: int) -> str | None:
        """Why nothing can be written to a decode worker now; None while it can be."""
        decode = self._decodes.get(decode_epoch)
        return None if decode is None else decode.unreachable

    def open(self, message: OpenRoom) -> None:
        """Take a reserved room; precedes its first chunk."""
        decode = self._decodes.get(message.decode_epoch)
        if decode is None or decode.dead:
            raise ProtocolError(
                "a room for a decode worker that is not connected", value=message.decode_epoch
            )
        if message.room in self._rooms:
            raise ProtocolError("room is already open at this rank", value=message.room)
        self._rooms[message.room] = _Room(
            decode,
            PrefillSession(
                room=message.room,
                rank=self._rank,
                epoch=self._epoch,
                peer_epoch=message.decode_epoch,
                reservation=message.reservation(decode.hello.physical_pages),
            ),
        )

    def send_chunk(self, part: BatchRequest) -> None:
        """Send this rank's pages among the positions that a batch has completed."""
        room = self._rooms.get(part.room)
        if room is None:
            return  # aborted while the batch was on its way
        sources, positions = NO_PAGES, NO_POSITIONS
        if not self._sends_nothing:
            sources, positions = self._layout.filter_owned_pages(
                LogicalPages(part.pages()[part.send_start : part.send_stop]),
                Positions(np.arange(part.send_start, part.send_stop, dtype=np.int64)),
            )
        self._carry_out(
            part.room, room.session.chunk_ready(part.chunk, sources, positions, last=part.last)
        )

    def on_decode(self, message: Acknowledged | AbortRoom) -> None:
        """Decode heard a conclusion, or stops a room."""
        room = self._rooms.get(message.room)
        if room is not None:
            self._carry_out(message.room, room.session.receive(message))

    def abort(self, message: AbortRoom) -> None:
        """The controller stops a room."""
        room = self._rooms.get(message.room)
        if room is not None:
            self._carry_out(message.room, room.session.abort(message.reason))

    def collect(self) -> None:
        """Take note of the writes that have ended."""
        ended = [write for write in self._writes if write.landed.done()]
        self._writes = [write for write in self._writes if write not in ended]
        for write in ended:
            self._end(write)

    def resend(self) -> None:
        """Say again what decode has not acknowledged, and look for workers that were lost."""
        for name in list(self._rooms):
            self._carry_out(name, self._rooms[name].session.resend_due())
        for decode in list(self._decodes.values()):
            if decode.dead:
                self._let_go(decode)
            elif decode.unreachable and self._transport.revive(decode.hello.session_id):
                decode.unreachable = None if self._drained(decode) else decode.unreachable

    @property
    def open_rooms(self) -> list[int]:
        """Rooms whose conclusion decode has not acknowledged."""
        return sorted(self._rooms)

    def check_invariants(self) -> None:
        """Raise `InvariantError` if a session's books do not balance."""
        for room in self._rooms.values():
            room.session.check_invariants()

    def close(self) -> None:
        """Forget all rooms and this epoch's pool, and unmap the decode workers' memory."""
        self._rooms.clear()
        self._writes.clear()
        for decode in self._decodes.values():
            self._transport.disconnect(decode.hello.session_id)
        self._decodes.clear()
        self._transport.unregister(self._region)

    def _carry_out(self, name: int, actions: list[PrefillAction]) -> None:
        room = self._rooms[name]
        for action in actions:
            match action:
                case SubmitWrite():
                    self._write(name, room, action)
                case SendMessage():
                    assert isinstance(action.message, Sent | Concluded | Quiesced)
                    self._to_decode(action.message)
                case ReleaseSources():
                    self._to_controller(
                        RoomConcluded(
                            rank=self._rank,
                            room=name,
                            pages=room.pages,
                            descriptors=room.descriptors,
                            bytes=room.nbytes,
                            failure=room.session.failure,
                        )
                    )
        if room.session.finished:
            self._rooms.pop(name, None)

    def _write(self, name: int, room: _Room, write: SubmitWrite) -> None:
        decode = room.decode
        runs = expand(
            merge_pages(write.source_physical_pages, write.destination_physical_pages),
            decode.areas,
            local_region=self._region.name,
            remote_region=decode.hello.regions[0].name,
        )
        begun = _Write(
            name,
            room,
            write.chunk,
            write.source_physical_pages,
            runs.count,
            self._transport.write(decode.hello.session_id, runs),
        )
        if begun.landed.done():
            self._end(begun)
        else:
            self._writes.append(begun)
            begun.landed.add_done_callback(lambda _: self._wake())

    def _end(self, write: _Write) -> None:
        room, session = write.room, write.room.session
        if self._rooms.get(write.name) is not room:
            return  # it was let go with its decode worker
        try:
            nbytes = write.landed.result()
        except TransferError as error:
            if error.kind == "unreachable" or not error.quiescent:
                room.decode.unreachable = room.decode.unreachable or str(error)
            actions = session.write_failed(write.chunk, str(error), quiescent=error.quiescent)
        else:
            room.pages += len(write.source_physical_pages)
            room.descriptors += write.descriptors
            room.nbytes += nbytes
            actions = session.write_done(
                write.chunk, write.descriptors, nbytes, self._checksums(write)
            )
        self._carry_out(write.name, actions)

    def _checksums(self, write: _Write) -> bytes:
        if not self._verify:
            return b""
        # The pages are locked until the room concludes: they are still what was sent.
        return pack_int64(page_checksums(self._pool, write.source_physical_pages))

    def _let_go(self, decode: _Decode) -> None:
        """Have the transport forget a dead decode worker: then no write to it can land."""
        try:
            self._transport.disconnect(decode.hello.session_id)
        except TransferError as error:
            logger.error("asked again later: %s", error)
            return
        del self._decodes[decode.hello.epoch]
        self._writes = [write for write in self._writes if write.room.decode is not decode]
        self._drained(decode)

    def _drained(self, decode: _Decode) -> bool:
        """No write to it that has failed can land: free what waited for that alone.

        False if a failed room has writes under way as well: ask once more when they have ended.
        """
        under_way = {write.name for write in self._writes}
        waiting = [
            name
            for name, room in self._rooms_of(decode)
            if room.session.state is PrefillState.DRAINING
        ]
        for name in waiting:
            if name not in under_way:
                self._carry_out(name, self._rooms[name].session.drained())
        return under_way.isdisjoint(waiting)

    def _rooms_of(self, decode: _Decode) -> list[tuple[int, _Room]]:
        return [(name, room) for name, room in self._rooms.items() if room.decode is decode]

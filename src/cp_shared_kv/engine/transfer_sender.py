"""A rank's side of all its transfers: sessions, transport and the link to decode."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from cp_shared_kv.engine.batch import BatchRequest
from cp_shared_kv.engine.messages import RoomConcluded
from cp_shared_kv.engine.transfer_peer import Answer, PeerState, TransferPeer
from cp_shared_kv.engine.transfer_peers import TransferPeers
from cp_shared_kv.errors import ProtocolError, TransferError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages, Positions
from cp_shared_kv.memory.page_checksums import page_checksums
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.transfer.actions import PrefillAction, ReleaseSources, SendMessage, SubmitWrite
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.descriptors import expand, merge_pages
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

NO_PAGES = PhysicalPages(np.zeros(0, dtype=np.int64))
NO_POSITIONS = Positions(np.zeros(0, dtype=np.int64))
Send = Callable[[msgspec.Struct], None]


@dataclass(eq=False)
class _Room:
    name: int
    decode: TransferPeer
    session: PrefillSession
    pages: int = 0
    descriptors: int = 0
    nbytes: int = 0


@dataclass(frozen=True, eq=False)
class _Write:
    """A chunk on its way to decode."""

    room: _Room
    chunk: int
    source_physical_pages: PhysicalPages
    descriptors: int
    landed: Future[int]


class TransferSender:
    """Sends the pages that this rank owns. `to_decode`, `to_controller` put messages on links.

    A write takes as long as it takes, and so does reaching a decode worker or letting it go:
    nothing here waits for it. `peers.wake` is called when something has ended, from any thread;
    then call `collect`.

    `sends_nothing` is for the ranks of a replicated group that hold copies of what rank 0 sends:
    they conclude every room with zero pages. `verify` sends a checksum with each page.
    """

    def __init__(
        self,
        layout: CpSharedKVLayout,
        pool: KVPool,
        peers: TransferPeers,
        *,
        rank: int,
        epoch: int,
        sends_nothing: bool,
        verify: bool,
        to_decode: Callable[[Sent | Concluded | Quiesced], None],
        to_controller: Send,
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._peers = peers
        self._transport = peers.transport
        self._region = peers.transport.register(pool.buffer)
        self._rank = rank
        self._epoch = epoch
        self._sends_nothing = sends_nothing
        self._verify = verify
        self._to_decode = to_decode
        self._to_controller = to_controller
        self._rooms: dict[int, _Room] = {}
        self._writes: list[_Write] = []

    def connect(self, decode: Hello, answer: Answer) -> None:
        """Map the pool of a decode worker that the controller has shaken hands with.

        `answer` is called with None when it can be written to, or with why it cannot; not if it
        is reported dead first. Only then may the controller open rooms for it. Again with the same
        Hello: no effect but the answer.

        ProtocolError, with nothing changed, for one without memory, and for one that is known
        under this epoch, or by this session, as another.
        """
        self._peers.connect(decode, self._pool, answer)

    def decode_dead(self, decode_epoch: int, reason: str) -> None:
        """A decode worker's process is gone: its rooms end, and its memory is unmapped."""
        decode = self._peers.of_epoch(decode_epoch)
        if decode is None:
            return
        for room in self._rooms_of(decode):
            self._carry_out(room, room.session.peer_dead(reason))
        decode.let_go(partial(self._gone, decode))

    def unreachable(self, decode_epoch: int) -> str | None:
        """Why nothing can be written to a decode worker now; None while it can be."""
        decode = self._peers.of_epoch(decode_epoch)
        return None if decode is None else decode.unreachable

    def open(self, message: OpenRoom) -> None:
        """Take a reserved room; precedes its first chunk.

        ProtocolError if it is for a decode worker of which this rank has not said that it is
        connected: the controller pairs with one when every rank has.
        """
        decode = self._peers.of_epoch(message.decode_epoch)
        if decode is None or decode.state is PeerState.CONNECTING:
            raise ProtocolError(
                "a room for a decode worker that is not connected",
                value=message.decode_epoch,
                allowed="one of which every rank has said that it is",
            )
        if message.room in self._rooms:
            raise ProtocolError("room is already open at this rank", value=message.room)
        self._rooms[message.room] = _Room(
            message.room,
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
            room, room.session.chunk_ready(part.chunk, sources, positions, last=part.last)
        )

    def on_decode(self, message: Acknowledged | AbortRoom) -> None:
        """Decode heard a conclusion, or stops a room."""
        room = self._rooms.get(message.room)
        if room is not None:
            self._carry_out(room, room.session.receive(message))

    def abort(self, message: AbortRoom) -> None:
        """The controller stops a room."""
        room = self._rooms.get(message.room)
        if room is not None:
            self._carry_out(room, room.session.abort(message.reason))

    def collect(self) -> None:
        """Take note of the writes that have ended, and of what has become of decode workers."""
        ended = [write for write in self._writes if write.landed.done()]
        self._writes = [write for write in self._writes if write not in ended]
        for write in ended:
            self._end(write)
        self._peers.collect()

    def resend(self) -> None:
        """Say again what decode has not acknowledged, and look for workers that were lost."""
        for room in list(self._rooms.values()):
            self._carry_out(room, room.session.resend_due())
        self._peers.look()
        for decode in self._peers.to_find():
            # Of what is lost while it is looked for, its being found says nothing.
            under_way = {write.room for write in self._writes}
            lost = [room for room in self._draining(decode) if room not in under_way]
            decode.find(partial(self._found, decode, lost))

    @property
    def open_rooms(self) -> list[int]:
        """Rooms whose conclusion decode has not acknowledged."""
        return sorted(self._rooms)

    def check_invariants(self) -> None:
        """Raise `InvariantError` if a session's books do not balance."""
        for room in self._rooms.values():
            room.session.check_invariants()

    def close(self, closed: Callable[[], None]) -> None:
        """The epoch is over: forget all rooms, let the decode workers go. Does not wait.

        `closed` is called when no write can read from the pool any more: until then it must stay.
        """
        self._rooms.clear()
        self._writes.clear()
        self._peers.retire(self._region, closed)

    def _carry_out(self, room: _Room, actions: list[PrefillAction]) -> None:
        for action in actions:
            match action:
                case SubmitWrite():
                    self._write(room, action)
                case SendMessage():
                    assert isinstance(action.message, Sent | Concluded | Quiesced)
                    self._to_decode(action.message)
                case ReleaseSources():
                    self._to_controller(
                        RoomConcluded(
                            rank=self._rank,
                            room=room.name,
                            pages=room.pages,
                            descriptors=room.descriptors,
                            bytes=room.nbytes,
                            failure=room.session.failure,
                        )
                    )
        if room.session.finished:
            self._rooms.pop(room.name, None)

    def _write(self, room: _Room, write: SubmitWrite) -> None:
        decode = room.decode
        runs = expand(
            merge_pages(write.source_physical_pages, write.destination_physical_pages),
            decode.areas,
            local_region=self._region.name,
            remote_region=decode.region,
        )
        begun = _Write(
            room,
            write.chunk,
            write.source_physical_pages,
            runs.count,
            self._transport.write(decode.session_id, runs),
        )
        if begun.landed.done():
            self._end(begun)
        else:
            self._writes.append(begun)
            begun.landed.add_done_callback(lambda _: self._peers.wake())

    def _end(self, write: _Write) -> None:
        room, session = write.room, write.room.session
        if self._rooms.get(room.name) is not room:
            return  # it was let go with its decode worker
        try:
            nbytes = write.landed.result()
        except TransferError as error:
            if error.kind == "unreachable" or not error.quiescent:
                room.decode.lost(str(error))
            actions = session.write_failed(write.chunk, str(error), quiescent=error.quiescent)
        else:
            room.pages += len(write.source_physical_pages)
            room.descriptors += write.descriptors
            room.nbytes += nbytes
            actions = session.write_done(
                write.chunk, write.descriptors, nbytes, self._checksums(write)
            )
        self._carry_out(room, actions)

    def _checksums(self, write: _Write) -> bytes:
        if not self._verify:
            return b""
        # The pages are locked until the room concludes: they are still what was sent.
        return pack_int64(page_checksums(self._pool, write.source_physical_pages))

    def _gone(self, decode: TransferPeer) -> None:
        """The transport has forgotten a dead decode worker: no write to it can land."""
        self._writes = [write for write in self._writes if write.room.decode is not decode]
        self._drained(self._draining(decode))

    def _found(self, decode: TransferPeer, rooms: list[_Room]) -> bool:
        """A decode worker can be written to again, and what these rooms had lost cannot land.

        False if others wait for it: then it is to be looked for once more.
        """
        waiting = self._draining(decode)
        self._drained([room for room in rooms if room in waiting])
        return not self._draining(decode)

    def _drained(self, rooms: list[_Room]) -> None:
        """No write of these failed rooms can land: free what waited for that alone."""
        for room in rooms:
            self._carry_out(room, room.session.drained())

    def _draining(self, decode: TransferPeer) -> list[_Room]:
        draining = PrefillState.DRAINING
        return [room for room in self._rooms_of(decode) if room.session.state is draining]

    def _rooms_of(self, decode: TransferPeer) -> list[_Room]:
        return [room for room in self._rooms.values() if room.decode is decode]

"""A room with both its sessions, a model of the two memories, and links that may do anything.

An event is one step, chosen by whoever drives the world: Hypothesis, or a search over all orders.
After each, the promises of the design are checked against the model (which writes may still land,
what each page holds, what was given back). One that does not hold is an AssertionError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.layout.pages import PhysicalPages, Positions
from cp_shared_kv.transfer.actions import (
    Covered,
    DecodeAction,
    FreePages,
    PrefillAction,
    ReleaseSources,
    RoomFailed,
    SendMessage,
    SubmitWrite,
)
from cp_shared_kv.transfer.decode_session import DecodeSession
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Acknowledged,
    Message,
    Withdrawn,
    decode,
    encode,
)
from cp_shared_kv.transfer.prefill_session import PrefillSession
from cp_shared_kv.transfer.reservation import Reservation

ROOM, PREFILL_EPOCH, DECODE_EPOCH = 5, 100, 200
FIRST_POSITION = 2
FIRST_DESTINATION = 40
SOURCE_STRIDE = 100  # at rank r, position p lies in page p + (r + 1) * 100

Mistake = Literal["skips a page", "sends another rank's page", "sends past the end"]


@dataclass(frozen=True)
class RoomPlan:
    """How many pages on how many ranks in how many chunks; and what rank 0 does wrong, if so."""

    cp_size: int
    pages: int
    chunks: int
    mistake: Mistake | None = None


@dataclass
class PendingWrite:
    """A submitted write that may still land; `given_up` once it was reported as failed."""

    rank: int
    submitted: SubmitWrite
    given_up: bool = False


@dataclass
class WorldRank:
    """A CP rank: its session once the room is open there, and its source pages."""

    session: PrefillSession | None = None
    next_chunk: int = 0
    alive: bool = True
    released: bool = False


class RoomWorld:
    """Both sides of one room and all that lies between them.

    `happen` is one event, `settle` the end of all faults. `links` holds the encoded messages
    that are under way, each with its receiver: a rank, or "decode".
    """

    def __init__(self, plan: RoomPlan) -> None:
        pages = np.arange(FIRST_DESTINATION, FIRST_DESTINATION + plan.pages, dtype=np.int64)
        self.plan = plan
        self.reservation = Reservation(FIRST_POSITION, PhysicalPages(pages))
        self.decode: DecodeSession | None = DecodeSession(
            ROOM, DECODE_EPOCH, PREFILL_EPOCH, plan.cp_size, self.reservation
        )
        self.ranks = [WorldRank() for _ in range(plan.cp_size)]
        self.links: list[tuple[int | Literal["decode"], bytes]] = []
        self.writes: list[PendingWrite] = []
        self.memory: dict[int, int] = {}  # destination page -> the source page whose bytes it has
        self.outcomes: list[str] = []
        self.freed = False
        self.withdrawn = False
        self.disturbed = plan.mistake is not None  # the room may fail

    def happen(self, event: str, choice: int) -> None:
        """One event; `choice` says to which rank, message or write. Does nothing if it cannot."""
        rank = choice % self.plan.cp_size
        working = self.ranks[rank].alive and self.decode is not None
        match event:
            case "open" if working:
                self._open(rank)
            case "chunk" if working:
                self._chunk(rank, self.ranks[rank].next_chunk)
            case "chunk again" if working and self.ranks[rank].next_chunk:
                self._chunk(rank, choice % self.ranks[rank].next_chunk)
            case "deliver" | "double" | "drop":
                self._deliver(choice, event)
            case "earlier life":
                self._deliver_from_an_earlier_life(choice)
            case "land" | "fail" | "lose track" | "land late":
                self._end_write(choice, event)
            case "drain" if working:
                self._drain(rank)
            case "resend":
                self._resend(choice % (self.plan.cp_size + 1))
            case "abort rank":
                self._abort_rank(rank)
            case "abort decode":
                self._abort_decode()
            case "kill decode":
                self._kill_decode()
            case "kill group":
                self._kill_group()
            case "withdraw":
                self._withdraw()
            case _:
                pass
        self._check()

    def settle(self) -> None:
        """No more faults: deliver, finish and repeat, until everybody is done, as they must be."""
        for _ in range(20):
            if self._done():
                break
            for rank, record in enumerate(self.ranks):
                # A room that decode gave up must end by decode's word alone.
                if record.alive and self.decode is not None and self.outcomes != ["failed"]:
                    self._open(rank)
                    while record.session is not None and record.next_chunk < self.plan.chunks:
                        self._chunk(rank, record.next_chunk)
            while unfinished := [w for w in self.writes if not w.given_up]:
                self._end_write(self.writes.index(unfinished[0]), "land")
            for rank, record in enumerate(self.ranks):
                if record.alive:
                    self._drain(rank)
            while self.links:
                self._deliver(0, "deliver")
            for who in range(self.plan.cp_size + 1):
                self._resend(who)
            self._check()
        assert self._done(), "the room stayed open"
        if self.decode is not None:
            assert self.outcomes == (["failed"] if self.freed else ["covered"]), self.outcomes

    # What the sessions ask for ---------------------------------------------------------------

    def _do_prefill(self, rank: int, actions: list[PrefillAction]) -> None:
        record = self.ranks[rank]
        for action in actions:
            match action:
                case SubmitWrite():
                    assert not self.freed, "a write was submitted into freed pages"
                    assert not record.released, "a released page was read"
                    self.writes.append(PendingWrite(rank, action))
                case SendMessage():
                    self.links.append(("decode", encode(action.message)))
                case ReleaseSources():
                    assert not record.released, "sources were released twice"
                    record.released = True

    def _do_decode(self, actions: list[DecodeAction]) -> None:
        for action in actions:
            match action:
                case SendMessage(message=Acknowledged() as message):
                    self.links.append((message.rank, encode(message)))
                case SendMessage(message=AbortRoom() as message):  # the controller tells them all
                    self.links += [(rank, encode(message)) for rank in range(self.plan.cp_size)]
                case SendMessage():
                    assert self.decode is None or self.decode.finished, "released too early"
                case Covered():
                    self.outcomes.append("covered")
                    self._check_memory()
                case RoomFailed():
                    assert self.disturbed, f"failed for no reason: {action.reason}"
                    self.outcomes.append("failed")
                case FreePages():
                    assert self.outcomes == ["failed"], "pages were freed before the room failed"
                    assert not self.freed, "pages were freed twice"
                    self.freed = True

    def _open(self, rank: int) -> None:
        if self.ranks[rank].session is None and not self.withdrawn:
            self._make_session(rank, self.reservation)

    def _make_session(self, rank: int, reservation: Reservation) -> PrefillSession:
        session = PrefillSession(ROOM, rank, PREFILL_EPOCH, DECODE_EPOCH, reservation)
        self.ranks[rank].session = session
        if self.decode is None:
            self._do_prefill(rank, session.peer_dead("decode exited"))
        return session

    def _chunk(self, rank: int, chunk: int) -> None:
        """A chunk is computed: the next one, or one before it again."""
        record = self.ranks[rank]
        if record.session is None or chunk >= self.plan.chunks:
            return
        positions = self._positions(rank, chunk)
        actions = record.session.chunk_ready(
            chunk,
            PhysicalPages(positions + SOURCE_STRIDE * (rank + 1)),
            Positions(positions),
            last=chunk == self.plan.chunks - 1,
        )
        assert chunk == record.next_chunk or not actions, "a repeat was not ignored"
        record.next_chunk = max(record.next_chunk, chunk + 1)
        self._do_prefill(rank, actions)

    def _positions(self, rank: int, chunk: int) -> npt.NDArray[np.int64]:
        """What the rank sends with the chunk: the positions that it owns, but for the mistake."""
        total = FIRST_POSITION + self.plan.pages
        start, stop = (total * c // self.plan.chunks for c in (chunk, chunk + 1))
        positions = np.arange(start, stop, dtype=np.int64)
        owner = positions % self.plan.cp_size
        owned = positions[owner == rank]
        if rank or chunk != self.plan.chunks - 1:
            return owned
        match self.plan.mistake:
            case "skips a page":
                return owned[:-1]
            case "sends another rank's page":
                return np.append(owned, positions[owner == 1][-1:])
            case "sends past the end":
                return np.append(owned, total)
            case None:
                return owned

    def _end_write(self, choice: int, how: str) -> None:
        if not self.writes:
            return
        write = self.writes[choice % len(self.writes)]
        session = self.ranks[write.rank].session
        assert session is not None
        chunk = write.submitted.chunk
        if how == "land late":
            if write.given_up:
                self._land(write)
        elif how == "lose track":
            if not write.given_up:
                self.disturbed = write.given_up = True
                failed = session.write_failed(chunk, "timeout", quiescent=False)
                self._do_prefill(write.rank, failed)
        else:
            self.writes.remove(write)
            if how == "land":
                self._land(write)
                self._do_prefill(write.rank, session.write_done(chunk, 1, 10))
            else:
                self.disturbed = True
                failed = session.write_failed(chunk, "refused", quiescent=True)
                self._do_prefill(write.rank, failed)

    def _land(self, write: PendingWrite) -> None:
        sources = write.submitted.source_physical_pages.tolist()
        destinations = write.submitted.destination_physical_pages.tolist()
        self.memory.update(zip(destinations, sources, strict=True))

    def _drain(self, rank: int) -> None:
        """The transport proves that no write of this rank can land."""
        session = self.ranks[rank].session
        if session is not None and session.failure is not None:
            self.writes = [write for write in self.writes if write.rank != rank]
            self._do_prefill(rank, session.drained())

    def _abort_rank(self, rank: int) -> None:
        record = self.ranks[rank]
        if not record.alive or (record.session is None and self.withdrawn):
            return
        self.disturbed = True
        nothing = Reservation(0, PhysicalPages(np.empty(0, dtype=np.int64)))
        session = record.session or self._make_session(rank, nothing)
        self._do_prefill(rank, session.abort("stopped"))

    def _kill_group(self) -> None:
        self.disturbed = True
        self.writes = []
        for record in self.ranks:
            record.alive = False
        if self.decode is not None:
            self._do_decode(self.decode.peer_dead("prefill exited"))

    def _withdraw(self) -> None:
        if any(record.session is not None for record in self.ranks):
            return
        self.disturbed = self.withdrawn = True
        message = Withdrawn(
            epoch=PREFILL_EPOCH, peer_epoch=DECODE_EPOCH, room=ROOM, reason="client gone"
        )
        self.links.append(("decode", encode(message)))

    def _abort_decode(self) -> None:
        if self.decode is not None:
            self.disturbed = True
            self._do_decode(self.decode.abort("client gone"))

    def _kill_decode(self) -> None:
        self.decode = None
        for rank, record in enumerate(self.ranks):
            if record.alive and record.session is not None:
                self._do_prefill(rank, record.session.peer_dead("decode exited"))

    def _deliver(self, choice: int, event: str) -> None:
        if not self.links:
            return
        at = choice % len(self.links)
        to, data = self.links[at] if event == "double" else self.links.pop(at)
        message = decode(data)
        if event == "drop":
            pass
        elif to == "decode":
            if self.decode is not None:
                self._do_decode(self.decode.receive(message))
        elif isinstance(message, AbortRoom):
            self._abort_rank(to)
        else:
            session = self.ranks[to].session
            if session is not None and self.ranks[to].alive:
                self._do_prefill(to, session.receive(message))

    def _deliver_from_an_earlier_life(self, choice: int) -> None:
        if not self.links:
            return
        to, data = self.links[choice % len(self.links)]
        receiver = self.decode if to == "decode" else self.ranks[to].session
        life = "epoch" if choice % 2 else "peer_epoch"
        message: Message = decode(data)
        old = msgspec.structs.replace(message, **{life: getattr(message, life) - 1})
        if receiver is not None:
            try:
                receiver.receive(old)
            except ProtocolError:
                return
            raise AssertionError("a message of an earlier life was taken")

    def _resend(self, who: int) -> None:
        if who < self.plan.cp_size:
            record = self.ranks[who]
            if record.alive and record.session is not None:
                self._do_prefill(who, record.session.resend_due())
            return
        if self.decode is not None:
            self._do_decode(self.decode.resend_due())
        if self.withdrawn:  # the answer to decode's AbortRoom
            self._withdraw()

    # Checks ----------------------------------------------------------------------------------

    def _check(self) -> None:
        for rank, record in enumerate(self.ranks):
            if record.session is not None and record.alive:
                record.session.check_invariants()
                assert record.released == record.session.quiescent
                reading = any(write.rank == rank for write in self.writes)
                assert not (record.released and reading), "a write reads released pages"
        if self.decode is not None:
            self.decode.check_invariants()
        assert len(self.outcomes) <= 1, "covered and failed"
        assert not (self.freed and self.writes), "a write can land in freed pages"
        assert not (self.outcomes == ["covered"] and self.writes), "covered under a write"

    def _check_memory(self) -> None:
        """Covered means: every page of the reservation holds the page of its position."""
        for i, page in enumerate(self.reservation.physical_pages.tolist()):
            position = FIRST_POSITION + i
            owner = position % self.plan.cp_size
            assert self.memory.get(page) == position + SOURCE_STRIDE * (owner + 1)

    def _done(self) -> bool:
        for record in self.ranks:
            if record.session is not None:
                if record.alive and not record.session.finished:
                    return False
            elif record.alive and not self.withdrawn and self.decode is not None:
                return False
        return self.decode is None or self.decode.finished

"""Random schedules of both sides of a room, over links that lose, double and reorder messages.

A model of the two memories runs beside the sessions: which write may still land, what each
destination page holds, which pages have been given back. After every step, and again when the
schedule is over and everything left has been delivered, the promises of the design must hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, note, settings

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
    Released,
    Withdrawn,
    decode,
    encode,
)
from cp_shared_kv.transfer.prefill_session import PrefillSession
from cp_shared_kv.transfer.reservation import Reservation

ROOM, PREFILL_EPOCH, DECODE_EPOCH = 5, 100, 200
FIRST_POSITION = 2
FIRST_DESTINATION = 40


@dataclass(frozen=True)
class Plan:
    """A room: how many pages, on how many ranks, in how many chunks, with which mistake."""

    cp_size: int
    pages: int
    chunks: int
    mistake: str | None = None


@dataclass
class Write:
    """One submitted write that may still land."""

    rank: int
    action: SubmitWrite
    ended: bool = False  # reported as failed, without proof that it cannot land


@dataclass
class Rank:
    """A CP rank as the world sees it."""

    session: PrefillSession | None = None
    next_chunk: int = 0
    alive: bool = True
    released: bool = False


@dataclass
class World:
    """Both sides of one room and all that lies between them."""

    plan: Plan
    decode: DecodeSession | None = None
    ranks: list[Rank] = field(default_factory=list)
    bag: list[tuple[Any, bytes]] = field(default_factory=list)  # (rank or "decode", message)
    writes: list[Write] = field(default_factory=list)
    memory: dict[int, tuple[int, int]] = field(default_factory=dict)
    outcomes: list[str] = field(default_factory=list)
    freed: bool = False
    decode_alive: bool = True
    withdrawn: bool = False
    disturbed: bool = False  # something happened after which the room may fail

    def __post_init__(self) -> None:
        pages = np.arange(FIRST_DESTINATION, FIRST_DESTINATION + self.plan.pages, dtype=np.int64)
        self.reservation = Reservation(FIRST_POSITION, PhysicalPages(pages))
        self.decode = DecodeSession(
            ROOM, DECODE_EPOCH, PREFILL_EPOCH, self.plan.cp_size, self.reservation
        )
        self.ranks = [Rank() for _ in range(self.plan.cp_size)]
        self.disturbed = self.plan.mistake is not None

    # What the sessions ask for ---------------------------------------------------------------

    def do_prefill(self, rank: int, actions: list[PrefillAction]) -> None:
        for action in actions:
            match action:
                case SubmitWrite():
                    assert not self.freed, "a write was submitted into freed pages"
                    assert not self.ranks[rank].released, "a released page was read"
                    self.writes.append(Write(rank, action))
                case SendMessage():
                    self.bag.append(("decode", encode(action.message)))
                case ReleaseSources():
                    assert not self.ranks[rank].released, "sources were released twice"
                    assert not self.may_land(rank), "sources were released under a write"
                    self.ranks[rank].released = True
        self.check()

    def do_decode(self, actions: list[DecodeAction]) -> None:
        for action in actions:
            match action:
                case SendMessage(message=Acknowledged() as message):
                    self.bag.append((message.rank, encode(message)))
                case SendMessage(message=AbortRoom() as message):  # the controller tells them all
                    self.bag += [(rank, encode(message)) for rank in range(self.plan.cp_size)]
                case SendMessage(message=Released()):
                    assert self.decode is not None
                    assert self.decode.finished
                case Covered():
                    self.outcomes.append("covered")
                    self.check_memory()
                case RoomFailed():
                    assert self.disturbed, f"failed for no reason: {action.reason}"
                    self.outcomes.append("failed")
                case FreePages():
                    assert self.outcomes == ["failed"], "pages were freed before the room failed"
                    assert not self.freed, "pages were freed twice"
                    assert not self.may_land(), "pages were freed under a write"
                    self.freed = True
        self.check()

    # Events ----------------------------------------------------------------------------------

    def open(self, rank: int) -> None:
        if self.ranks[rank].session is None and not self.withdrawn:
            self.ranks[rank].session = PrefillSession(
                ROOM, rank, PREFILL_EPOCH, DECODE_EPOCH, self.reservation
            )

    def chunk(self, rank: int, chunk: int | None = None) -> None:
        """The next chunk, or an earlier one again."""
        record = self.ranks[rank]
        number = record.next_chunk if chunk is None else chunk
        if record.session is None or number >= self.plan.chunks:
            return
        positions = self.positions(rank, number)
        actions = record.session.chunk_ready(
            number,
            PhysicalPages(positions + 100 * (rank + 1)),
            Positions(positions),
            last=number == self.plan.chunks - 1,
        )
        assert chunk is None or not actions, "a repeat was not ignored"
        record.next_chunk = max(record.next_chunk, number + 1)
        self.do_prefill(rank, actions)

    def positions(self, rank: int, chunk: int) -> np.ndarray:
        """The absolute positions a rank sends with a chunk: its own, but for the mistake."""
        total = FIRST_POSITION + self.plan.pages
        bounds = [total * i // self.plan.chunks for i in range(self.plan.chunks + 1)]
        positions = np.arange(bounds[chunk], bounds[chunk + 1], dtype=np.int64)
        owned = positions[positions % self.plan.cp_size == rank]
        if rank or chunk != self.plan.chunks - 1:
            return owned
        match self.plan.mistake:
            case "skips a page":
                return owned[:-1]
            case "sends another rank's page":
                return np.append(owned, positions[(positions % self.plan.cp_size == 1)][-1:])
            case "sends past the end":
                return np.append(owned, total)
            case _:
                return owned

    def end_write(self, choice: int, how: str) -> None:
        if not self.writes:
            return
        write = self.writes[choice % len(self.writes)]
        session = self.session(write.rank)
        chunk = write.action.chunk
        if how == "land":
            self.land(write)
            self.writes.remove(write)
            self.do_prefill(write.rank, session.write_done(chunk, 1, 10))
        elif how == "fail":
            self.disturbed = True
            self.writes.remove(write)
            self.do_prefill(write.rank, session.write_failed(chunk, "refused", quiescent=True))
        elif how == "lose track" and not write.ended:
            self.disturbed = write.ended = True
            self.do_prefill(write.rank, session.write_failed(chunk, "timeout", quiescent=False))
        elif how == "land late" and write.ended:
            self.land(write)

    def drain(self, rank: int) -> None:
        """The transport proves that no write of this rank can land."""
        session = self.ranks[rank].session
        if session is not None and session.failure is not None:
            self.writes = [write for write in self.writes if write.rank != rank]
            self.do_prefill(rank, session.drained())

    def land(self, write: Write) -> None:
        assert not self.freed, "a write landed in freed pages"
        assert not self.ranks[write.rank].released, "a write read a released page"
        for source, destination in zip(
            write.action.source_physical_pages.tolist(),
            write.action.destination_physical_pages.tolist(),
            strict=True,
        ):
            self.memory[destination] = (write.rank, source)

    def abort_rank(self, rank: int, reason: str = "stopped") -> None:
        record = self.ranks[rank]
        if not record.alive:
            return
        self.disturbed = True
        if record.session is None:
            if self.withdrawn:
                return
            nothing = Reservation(0, PhysicalPages(np.empty(0, dtype=np.int64)))
            record.session = PrefillSession(ROOM, rank, PREFILL_EPOCH, DECODE_EPOCH, nothing)
            if not self.decode_alive:
                self.do_prefill(rank, record.session.peer_dead("decode exited"))
        self.do_prefill(rank, record.session.abort(reason))

    def abort_decode(self, *, heard: bool) -> None:
        if self.decode is not None:
            self.disturbed = True
            leave = self.decode.abort if heard else self.decode.peer_unreachable
            self.do_decode(leave("client gone"))

    def kill_rank(self, rank: int) -> None:
        record = self.ranks[rank]
        if not record.alive:
            return
        self.disturbed = True
        record.alive = False
        self.writes = [write for write in self.writes if write.rank != rank]
        if self.decode is not None:
            self.do_decode(self.decode.rank_dead(rank))

    def kill_decode(self) -> None:
        self.decode_alive, self.decode = False, None
        for rank, record in enumerate(self.ranks):
            if record.alive and record.session is not None:
                self.do_prefill(rank, record.session.peer_dead("decode exited"))

    def kill_group(self) -> None:
        self.disturbed = True
        self.writes = []
        for record in self.ranks:
            record.alive = False
        if self.decode is not None:
            self.do_decode(self.decode.peer_dead("prefill exited"))

    def withdraw(self) -> None:
        if any(record.session is not None for record in self.ranks):
            return
        self.disturbed = self.withdrawn = True
        self.tell_withdrawn()

    def tell_withdrawn(self) -> None:
        message = Withdrawn(
            epoch=PREFILL_EPOCH, peer_epoch=DECODE_EPOCH, room=ROOM, reason="client gone"
        )
        self.bag.append(("decode", encode(message)))

    def deliver(self, choice: int, *, keep: bool = False, drop: bool = False) -> None:
        if not self.bag:
            return
        at = choice % len(self.bag)
        to, data = self.bag[at] if keep else self.bag.pop(at)
        if drop:
            return
        message = decode(data)
        if to == "decode":
            self.receive_at_decode(message)
        elif self.ranks[to].alive and isinstance(message, AbortRoom):
            self.abort_rank(to)
        elif self.ranks[to].alive:
            self.do_prefill(to, self.session(to).receive(message))

    def receive_at_decode(self, message: Message) -> None:
        if self.decode is not None:
            self.do_decode(self.decode.receive(message))

    def deliver_from_an_earlier_life(self, choice: int) -> None:
        if not self.bag or self.decode is None:
            return
        to, data = self.bag[choice % len(self.bag)]
        message = decode(data)
        life = "epoch" if choice % 2 else "peer_epoch"
        old = msgspec.structs.replace(message, **{life: getattr(message, life) - 1})  # type: ignore[type-var]
        receiver = self.decode if to == "decode" else self.ranks[to].session
        if receiver is not None:
            with pytest.raises(ProtocolError, match="another life"):
                receiver.receive(old)
            self.check()

    def resend(self, who: int) -> None:
        rank = who % (self.plan.cp_size + 1)
        if rank == self.plan.cp_size:
            if self.decode is not None:
                self.do_decode(self.decode.resend_due())
            if self.withdrawn:  # the answer to decode's heartbeat, which still lists the room
                self.tell_withdrawn()
        elif self.ranks[rank].alive:
            session = self.ranks[rank].session
            if session is not None:
                self.do_prefill(rank, session.resend_due())

    # Checks ----------------------------------------------------------------------------------

    def session(self, rank: int) -> PrefillSession:
        session = self.ranks[rank].session
        assert session is not None
        return session

    def may_land(self, rank: int | None = None) -> list[Write]:
        return [write for write in self.writes if rank is None or write.rank == rank]

    def check(self) -> None:
        for rank, record in enumerate(self.ranks):
            if record.session is not None and record.alive:
                record.session.check_invariants()
                assert record.released == record.session.quiescent
                assert not (record.released and self.may_land(rank))
        if self.decode is not None:
            self.decode.check_invariants()
        assert len(self.outcomes) <= 1, "covered and failed"
        assert not (self.freed and self.may_land()), "a write can land in freed pages"

    def check_memory(self) -> None:
        """Covered means: every page of the reservation holds the page of its position."""
        for i, page in enumerate(self.reservation.physical_pages.tolist()):
            position = FIRST_POSITION + i
            owner = position % self.plan.cp_size
            assert self.memory.get(page) == (owner, position + 100 * (owner + 1))

    def settle(self) -> None:
        """No more faults: deliver, finish and repeat until everyone is done."""
        for _ in range(20):
            if self.done():
                break
            for rank, record in enumerate(self.ranks):
                if self.outcomes == ["failed"]:
                    break  # a room that decode gave up ends by decode's word alone
                if record.alive and self.decode_alive:
                    self.open(rank)
                while record.alive and record.session and record.next_chunk < self.plan.chunks:
                    self.chunk(rank)
            while any(not write.ended for write in self.writes):
                self.end_write([write.ended for write in self.writes].index(False), "land")
            for rank, record in enumerate(self.ranks):
                if record.alive:
                    self.drain(rank)
            while self.bag:
                self.deliver(0)
            for who in range(self.plan.cp_size + 1):
                self.resend(who)
        assert self.done(), "the room stayed open"
        if self.decode is not None:
            assert self.outcomes == (["failed"] if self.freed else ["covered"])
            assert self.disturbed or self.outcomes == ["covered"]

    def done(self) -> bool:
        ranks = [r for r in self.ranks if r.alive and not self.withdrawn]
        if not self.decode_alive:
            ranks = [r for r in ranks if r.session is not None]
        finished = all(r.session is not None and r.session.finished for r in ranks)
        return finished and (self.decode is None or self.decode.finished)


# Frequent events stand more than once: a room that dies young proves little.
EVENTS = (
    *["open", "chunk", "deliver", "land"] * 15,
    *["resend", "double", "drop", "chunk again"] * 5,
    *["earlier life", "fail", "lose track", "land late", "drain"] * 2,
    *["abort rank", "abort decode", "silence", "kill rank", "kill decode", "kill group"],
    "withdraw",
)


def happen(world: World, event: str, choice: int) -> None:
    rank = choice % world.plan.cp_size
    alive = world.ranks[rank].alive and world.decode_alive
    match event:
        case "open" if alive:
            world.open(rank)
        case "chunk" if alive:
            world.chunk(rank)
        case "chunk again" if alive and world.ranks[rank].next_chunk:
            world.chunk(rank, choice % world.ranks[rank].next_chunk)
        case "deliver":
            world.deliver(choice)
        case "double":
            world.deliver(choice, keep=True)
        case "drop":
            world.deliver(choice, drop=True)
        case "earlier life":
            world.deliver_from_an_earlier_life(choice)
        case "land" | "fail" | "lose track" | "land late":
            world.end_write(choice, event)
        case "drain" if alive:
            world.drain(rank)
        case "resend":
            world.resend(choice)
        case "abort rank":
            world.abort_rank(rank)
        case "abort decode" | "silence":
            world.abort_decode(heard=event == "abort decode")
        case "kill rank":
            world.kill_rank(rank)
        case "kill decode":
            world.kill_decode()
        case "kill group":
            world.kill_group()
        case "withdraw":
            world.withdraw()
        case _:
            pass


PLANS = st.builds(
    Plan, cp_size=st.integers(1, 4), pages=st.integers(0, 6), chunks=st.integers(1, 3)
)


# Two bytes a step, long enough to get somewhere. Zero bytes shrink to "nothing".
SCHEDULES = st.binary(min_size=60, max_size=160)


def run(plan: Plan, schedule: bytes, events: tuple[str, ...]) -> World:
    """A world after the whole schedule, and after all that it left open was settled."""
    choices = ("nothing", *events)
    world = World(plan)
    for event, choice in zip(schedule[::2], schedule[1::2], strict=False):
        note(f"{choices[event % len(choices)]} {choice}")
        happen(world, choices[event % len(choices)], choice)
    world.settle()
    return world


@settings(max_examples=400, deadline=None)
@given(plan=PLANS, schedule=SCHEDULES)
def test_no_schedule_loses_doubles_or_reuses_a_page_too_early(plan: Plan, schedule: bytes) -> None:
    run(plan, schedule, EVENTS)


HARMLESS = ("open", "chunk", "deliver", "land", "resend", "double", "drop", "chunk again")


@settings(max_examples=100, deadline=None)
@given(plan=PLANS, schedule=SCHEDULES)
def test_a_room_without_a_fault_is_covered_whatever_the_links_do(
    plan: Plan, schedule: bytes
) -> None:
    world = run(plan, schedule, HARMLESS)
    assert world.outcomes == ["covered"]


@settings(max_examples=100, deadline=None)
@given(
    plan=st.builds(
        Plan,
        cp_size=st.integers(2, 4),
        pages=st.integers(8, 10),
        chunks=st.integers(1, 2),
        mistake=st.sampled_from(
            ["skips a page", "sends another rank's page", "sends past the end"]
        ),
    ),
    schedule=SCHEDULES,
)
def test_a_rank_that_sends_the_wrong_pages_fails_the_room_in_every_order(
    plan: Plan, schedule: bytes
) -> None:
    world = run(plan, schedule, HARMLESS)
    assert world.outcomes == ["failed"]
    assert world.freed

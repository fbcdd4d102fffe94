"""A CP rank without a model or a transport: its sessions, and writes that land when told to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.messages import BatchDone, RoomConcluded, RoomToken
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages, Positions
from cp_shared_kv.transfer.actions import PrefillAction, ReleaseSources, SendMessage, SubmitWrite
from cp_shared_kv.transfer.messages import AbortRoom, OpenRoom
from cp_shared_kv.transfer.prefill_session import PrefillSession

from .decode_model import CP_SIZE, EPOCH, PAGE_SIZE, VOCAB, Books, first_token, page_content

Put = Callable[[str, str, msgspec.Struct], None]
"""Sends a message: from whom, to whom."""


@dataclass
class Write:
    """A write in flight; `stray`: it was reported as broken, and may land all the same."""

    room: int
    chunk: int
    sources: list[int]  # logical pages
    destinations: list[int]
    stray: bool = False


class Rank:
    """A CP rank without a model: its sessions, and the writes that it has started."""

    def __init__(self, rank: int, physical_pages: int, books: Books, put: Put) -> None:
        self.rank, self.books, self.put = rank, books, put
        self.layout = CpSharedKVLayout(PAGE_SIZE, CP_SIZE, rank, physical_pages=physical_pages)
        self.sessions: dict[int, PrefillSession] = {}
        self.writes: list[Write] = []

    def handle(self, message: msgspec.Struct) -> None:
        match message:
            case OpenRoom():
                assert message.room not in self.sessions
                self.sessions[message.room] = PrefillSession(
                    message.room,
                    self.rank,
                    EPOCH,
                    message.decode_epoch,
                    message.reservation(self.books.decode_pool.total_pages),
                )
            case Batch():
                self.run(message)
            case AbortRoom():
                session = self.sessions.get(message.room)
                if session is not None:
                    self.carry_out(message.room, session.abort(message.reason))
            case _:
                raise AssertionError(message)

    def run(self, batch: Batch) -> None:
        books = self.books
        batch.validate(page_size=PAGE_SIZE, logical_pages=books.pool.total_pages, vocab_size=VOCAB)
        tokens: list[RoomToken] = []
        for part in batch.requests:
            prompt = books.clients[part.room].prompt
            stop = part.prefix_tokens + part.new_tokens
            pages = part.pages().tolist()
            for position in range(part.prefix_tokens // PAGE_SIZE):
                assert books.prefill_content[pages[position]] == page_content(prompt, position)
            for position in range(part.prefix_tokens // PAGE_SIZE, len(pages)):
                content = page_content(prompt, position)[:stop]
                books.prefill_content[pages[position]] = content
            if part.last and part.room % CP_SIZE == self.rank:
                tokens.append(RoomToken(room=part.room, token_id=first_token(prompt)))
        done = BatchDone(rank=self.rank, batch_id=batch.batch_id, tokens=tokens, scratch_bytes=0)
        self.put(f"rank {self.rank}", "controller", done)
        for part in batch.requests:
            session = self.sessions.get(part.room)
            if session is None:
                continue
            sent = slice(part.send_start, part.send_stop)
            sources, positions = self.layout.filter_owned_pages(
                LogicalPages(part.pages()[sent]),
                Positions(np.arange(part.send_start, part.send_stop)),
            )
            actions = session.chunk_ready(part.chunk, sources, positions, last=part.last)
            self.carry_out(part.room, actions)

    def carry_out(self, room: int, actions: list[PrefillAction]) -> None:
        session = self.sessions[room]
        for action in actions:
            match action:
                case SubmitWrite():
                    logical = self.layout.physical_pages_to_logical(
                        PhysicalPages(action.source_physical_pages)
                    )
                    destinations = action.destination_physical_pages.tolist()
                    self.writes.append(Write(room, action.chunk, logical.tolist(), destinations))
                case SendMessage():
                    self.put(f"rank {self.rank}", "decode", action.message)
                case ReleaseSources():
                    concluded = RoomConcluded(
                        rank=self.rank,
                        room=room,
                        pages=0,
                        descriptors=0,
                        bytes=0,
                        failure=session.failure,
                    )
                    self.put(f"rank {self.rank}", "controller", concluded)
        session.check_invariants()
        if session.finished:
            del self.sessions[room]

    def land(self, write: Write) -> None:
        """The bytes arrive: the source must still be the prompt's, the destination the room's."""
        books = self.books
        self.writes.remove(write)
        prompt = books.clients[write.room].prompt
        reserved = books.decode_pool.pages(write.room).tolist()
        held = books.pool.pages(write.room).tolist()
        for source, destination in zip(write.sources, write.destinations, strict=True):
            position = reserved.index(destination)
            assert held[position] == source
            assert books.prefill_content[source] == page_content(prompt, position)
            books.decode_content[destination] = page_content(prompt, position)
        if not write.stray:
            self.carry_out(
                write.room, self.sessions[write.room].write_done(write.chunk, 1, len(reserved))
            )

    def fail(self, write: Write, quiescent: bool) -> None:
        self.books.clients[write.room].harmed = True
        session = self.sessions[write.room]
        if quiescent:
            self.writes.remove(write)
        else:
            write.stray = True
        actions = session.write_failed(write.chunk, "the wire broke", quiescent=quiescent)
        self.carry_out(write.room, actions)

    def drain(self, room: int) -> None:
        """The transport proves that nothing of a failed room can land any more."""
        self.writes = [write for write in self.writes if write.room != room]
        self.carry_out(room, self.sessions[room].drained())

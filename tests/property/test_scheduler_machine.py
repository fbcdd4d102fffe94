"""Random lives of requests in the prefill scheduler, with ranks that conclude in any legal order.

The model remembers, for every slot of the logical pool, the whole prefix of tokens whose KV was
computed into it last. So each batch shows whether the pages it builds on hold what it believes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cp_shared_kv.engine.batch import Batch, BatchRequest
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.pairing import DecodePeer
from cp_shared_kv.engine.request import PrefillRequest, Stage
from cp_shared_kv.engine.scheduler import PrefillScheduler
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.memory.page_keys import page_keys
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import OpenRoom, SamplingParams

PAGE_SIZE = 4
DECODE = DecodePeer(Life("decode", 0, 1), 2, send=lambda message: None)
EPOCH = 7
Prompt = tuple[int, ...]


@dataclass
class ModelRoom:
    """What the outside knows of one request."""

    prompt: Prompt
    first_position: int = 0
    computed: int | None = None  # tokens, the cached prefix included; None before admission
    sent_to: int = 0
    chunks: int = 0
    last_sent: bool = False
    aborted: bool = False
    last_done_at: set[int] = field(default_factory=set[int])
    concluded: set[int] = field(default_factory=set[int])

    @property
    def pages(self) -> int:
        return -(-len(self.prompt) // PAGE_SIZE)


def tokens_in_common(a: Prompt, b: Prompt) -> int:
    """Length of the beginning that both have."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        cp_size=st.integers(1, 3),
        physical_pages=st.integers(2, 5),
        chunk_tokens=st.integers(1, 20),
        prefix_share=st.floats(0, 1),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        cp_size: int,
        physical_pages: int,
        chunk_tokens: int,
        prefix_share: float,
        prefix_caching: bool,
    ) -> None:
        capacity = KVCapacity(physical_pages, PAGE_SIZE, cp_size)
        self.pool = LogicalPool(capacity, prefix_caching=prefix_caching)
        self.cp_size, self.chunk_tokens = cp_size, chunk_tokens
        self.max_prefix_pages = 1 + int(prefix_share * (self.pool.total_pages - 1))
        self.scheduler = PrefillScheduler(
            self.pool,
            group_ranks=cp_size,
            chunk_tokens=chunk_tokens,
            max_prefix_pages=self.max_prefix_pages,
            epoch=EPOCH,
        )
        self.rooms: dict[int, ModelRoom] = {}
        self.reservations: list[int] = []  # rooms that wait for admission, in their order
        self.content: dict[tuple[int, int], Prompt] = {}
        self.prompts: list[Prompt] = [()]
        self.busy: set[int] = set()
        self.batches = 0
        self.next_room = 1

    # What comes in ---------------------------------------------------------------------------

    @rule(
        data=st.data(),
        kept=st.integers(0, 40),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=14),
    )
    def submit(self, data: st.DataObject, kept: int, more: list[int]) -> None:
        base = data.draw(st.sampled_from(self.prompts), label="base")
        prompt = (*base[:kept], *more)[: self.pool.total_pages * PAGE_SIZE]
        self.prompts.append(prompt)
        tokens = np.array(prompt, np.int64)
        room = self.next_room
        self.next_room += 1
        self.rooms[room] = ModelRoom(prompt)
        self.scheduler.submit(
            PrefillRequest(
                room=room,
                decode=DECODE,
                token_ids=tokens,
                max_tokens=3,
                sampling=SamplingParams(),
                page_keys=page_keys(tokens, PAGE_SIZE),
            )
        )

    def in_stage(self, *stages: Stage) -> list[int]:
        return [r.room for r in self.scheduler.requests() if r.stage in stages]

    @precondition(lambda self: self.in_stage(Stage.OFFERED))
    @rule(data=st.data(), held=st.integers(0, 12))
    def reserve(self, data: st.DataObject, held: int) -> None:
        name = data.draw(st.sampled_from(self.in_stage(Stage.OFFERED)), label="room")
        room = self.rooms[name]
        room.first_position = room.sent_to = min(held, room.pages)
        self.reservations.append(name)
        self.scheduler.reserved(self.reservation(name))

    @rule(name=st.integers(1, 20))
    def hear_of_it_again(self, name: int) -> None:
        """A repeat, or news of a room that is gone, changes nothing."""
        if name not in self.in_stage(Stage.OFFERED):
            self.scheduler.reserved(self.reservation(name))
        if name not in self.rooms:
            assert self.scheduler.concluded(name, 0) is None
            assert self.scheduler.abort(name, "too late") is None

    def reservation(self, name: int) -> OpenRoom:
        room = self.rooms.get(name, ModelRoom((0,)))
        owed = np.arange(1, 1 + room.pages - room.first_position)
        return OpenRoom(
            epoch=EPOCH,
            room=name,
            decode_epoch=8,
            first_position=room.first_position,
            physical_pages=pack_int64(owed),
            total_positions=room.pages,
        )

    # The ranks -------------------------------------------------------------------------------

    @rule()
    def start_batch(self) -> None:
        planned = self.scheduler.next_batch()
        if self.busy:
            assert planned is None
            return
        if planned is None:
            assert not self.in_stage(Stage.PREFILLING)
            assert not self.reservations or self.pool.locked_pages  # an empty pool admits anyone
            return
        batch, admitted = planned
        for request in admitted:
            self.check_whom_it_passed(request, batch)
            self.reservations.remove(request.room)
            self.check_admission(request)
        self.check_batch(batch)
        self.busy = set(range(self.cp_size))

    def check_whom_it_passed(self, request: PrefillRequest, batch: Batch) -> None:
        """They have a page in common with what this batch computes, and it ends in this batch."""
        before = self.reservations[: self.reservations.index(request.room)]
        parts = {part.room: part for part in batch.requests}
        assert not before or parts[request.room].last
        for name in before:
            shared = [
                tokens_in_common(self.rooms[name].prompt, self.rooms[room].prompt)
                for room, part in parts.items()
                if part.new_tokens >= PAGE_SIZE or part.prefix_tokens
            ]
            assert self.pool.prefix_caching
            assert max(shared) >= PAGE_SIZE

    def check_admission(self, request: PrefillRequest) -> None:
        room = self.rooms[request.room]
        assert request.cached_tokens % PAGE_SIZE == 0
        assert request.cached_tokens < len(room.prompt)
        room.computed = request.cached_tokens

    def check_batch(self, batch: Batch) -> None:
        self.batches += 1
        assert (batch.epoch, batch.batch_id) == (EPOCH, self.batches)
        assert self.scheduler.in_flight is batch
        total = self.pool.total_pages
        batch.validate(page_size=PAGE_SIZE, logical_pages=total, vocab_size=2)
        assert 0 < sum(part.new_tokens for part in batch.requests) <= self.chunk_tokens
        prefixes = [
            part.pages()[: -(-part.prefix_tokens // PAGE_SIZE)].tolist() for part in batch.requests
        ]
        unique_prefix_pages = len({page for prefix in prefixes for page in prefix})
        assert len(batch.requests) == 1 or unique_prefix_pages <= self.max_prefix_pages
        for part in batch.requests:  # all reads see what earlier batches wrote
            self.check_prefix(part)
        start = 0
        for part in batch.requests:
            stop = start + part.new_tokens
            self.check_part(part, batch.tokens()[start:stop].tolist())
            start = stop

    def slot(self, part: BatchRequest, token: int) -> tuple[int, int]:
        return int(part.pages()[token // PAGE_SIZE]), token % PAGE_SIZE

    def check_prefix(self, part: BatchRequest) -> None:
        room = self.rooms[part.room]
        assert part.prefix_tokens == room.computed
        for token in range(part.prefix_tokens):
            assert self.content[self.slot(part, token)] == room.prompt[: token + 1]

    def check_part(self, part: BatchRequest, tokens: list[int]) -> None:
        room = self.rooms[part.room]
        stop = part.prefix_tokens + part.new_tokens
        assert tuple(tokens) == room.prompt[part.prefix_tokens : stop]
        assert part.pages().tolist() == self.pool.pages(part.room)[: part.pages().size].tolist()
        for token in range(part.prefix_tokens, stop):
            self.content[self.slot(part, token)] = room.prompt[: token + 1]
        room.computed = stop
        # Chunks go to decode one after another, without gap or overlap, complete pages only.
        assert not room.last_sent
        assert part.chunk == room.chunks
        assert part.send_start == room.sent_to
        assert part.last == (stop == len(room.prompt))
        if part.last:
            assert part.send_stop == room.pages
        else:
            assert part.send_stop == max(stop // PAGE_SIZE, room.first_position)
        room.chunks += 1
        room.sent_to = part.send_stop
        room.last_sent = part.last

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def rank_is_done(self, data: st.DataObject) -> None:
        self.finish_at(data.draw(st.sampled_from(sorted(self.busy)), label="rank"))

    @precondition(lambda self: self.busy)
    @rule()
    def all_ranks_are_done(self) -> None:
        for rank in sorted(self.busy):
            self.finish_at(rank)

    def finish_at(self, rank: int) -> None:
        batch = self.scheduler.in_flight
        assert batch is not None
        self.busy.remove(rank)
        for part in batch.requests:
            if part.last:
                self.rooms[part.room].last_done_at.add(rank)
        if self.busy:
            return
        completed, gone = self.scheduler.batch_done(batch.batch_id)
        stopped = {part.room for part in batch.requests if self.rooms[part.room].aborted}
        last = {part.room for part in batch.requests if part.last}
        assert {request.room for request in completed} == last - stopped
        for request in completed:
            self.check_published(request)
        for request in gone:
            self.forget(request)

    def check_published(self, request: PrefillRequest) -> None:
        """What was computed of a prompt serves the next one, from the cache."""
        if self.pool.prefix_caching:
            full_pages = request.computed_tokens // PAGE_SIZE
            assert self.pool.match(request.page_keys[:full_pages]) == full_pages

    def can_succeed(self) -> list[tuple[int, int]]:
        return [
            (name, rank)
            for name in self.in_stage(Stage.PREFILLING, Stage.SENDING)
            for rank in sorted(self.rooms[name].last_done_at - self.rooms[name].concluded)
        ]

    @precondition(lambda self: self.can_succeed())
    @rule(data=st.data())
    def rank_succeeds(self, data: st.DataObject) -> None:
        self.conclude(*data.draw(st.sampled_from(self.can_succeed()), label="room, rank"))

    @precondition(lambda self: self.can_succeed())
    @rule()
    def all_transfers_end(self) -> None:
        for name, rank in self.can_succeed():
            self.conclude(name, rank)

    @precondition(lambda self: self.in_stage(Stage.PREFILLING, Stage.SENDING))
    @rule(data=st.data(), failing=st.sets(st.integers(0, 2), min_size=1), stopped=st.booleans())
    def ranks_fail(self, data: st.DataObject, failing: set[int], stopped: bool) -> None:
        """Transfers break, at any time; the room may be stopped then, or later by decode."""
        running = self.in_stage(Stage.PREFILLING, Stage.SENDING)
        name = data.draw(st.sampled_from(running), label="room")
        failing = failing & (set(range(self.cp_size)) - self.rooms[name].concluded)
        if stopped:
            self.stop(name)  # which ends it where every rank has concluded before
        for rank in failing:
            self.conclude(name, rank)

    def conclude(self, name: int, rank: int) -> None:
        if name not in self.rooms:
            return  # its abort was the last that it waited for
        room = self.rooms[name]
        room.concluded.add(rank)
        was_sending = self.scheduler.get(name).stage is Stage.SENDING
        gone = self.scheduler.concluded(name, rank)
        assert (gone is not None) == (was_sending and len(room.concluded) == self.cp_size)
        if gone is not None:
            self.forget(gone)

    # Aborts ----------------------------------------------------------------------------------

    @precondition(lambda self: self.rooms)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.stop(data.draw(st.sampled_from(sorted(self.rooms)), label="room"))

    def stop(self, name: int) -> None:
        room = self.rooms[name]
        waiting = name in self.in_stage(Stage.OFFERED, Stage.RESERVED)
        if name in self.reservations:
            self.reservations.remove(name)
        gone = self.scheduler.abort(name, "no longer wanted")
        room.aborted = True
        if waiting:
            assert gone is not None
        if gone is not None:
            assert gone.failure == "no longer wanted"
            self.forget(gone)

    def forget(self, request: PrefillRequest) -> None:
        """A request ends once: completely sent, stopped, or failed at every rank."""
        room = self.rooms.pop(request.room)
        assert self.scheduler.get(request.room) is None
        assert request.room not in self.pool.rooms
        assert (request.failure is not None) == room.aborted
        self.check_published(request)
        if not room.aborted:
            assert room.last_sent
            assert room.sent_to == room.pages
            assert room.computed == len(room.prompt)

    # Always ----------------------------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        self.scheduler.check_invariants()
        pool = self.pool
        assert pool.available_pages + pool.cached_pages + pool.locked_pages == pool.total_pages
        assert {request.room for request in self.scheduler.requests()} == set(self.rooms)
        assert self.scheduler.queued + self.scheduler.running == len(self.rooms)
        for name in self.in_stage(Stage.SENDING):
            assert len(self.rooms[name].concluded) < self.cp_size, "over, and still here"
        assert self.in_stage(Stage.RESERVED) == sorted(self.reservations)

    def teardown(self) -> None:
        """Whatever state it was left in, everything ends and every page comes back."""
        if not hasattr(self, "pool"):
            return
        for name in self.in_stage(Stage.OFFERED):
            self.reservations.append(name)
            self.scheduler.reserved(self.reservation(name))
        steps = 0
        while self.rooms:
            steps += 1
            assert steps < 500, "a request does not end"
            self.all_ranks_are_done()
            self.all_transfers_end()
            for name in self.in_stage(Stage.SENDING):
                if self.rooms[name].aborted:
                    for rank in set(range(self.cp_size)) - self.rooms[name].concluded:
                        self.conclude(name, rank)
            self.start_batch()
            self.the_books_balance()
        assert self.pool.locked_pages == 0
        self.pool.clear()
        assert self.pool.available_pages == self.pool.total_pages


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

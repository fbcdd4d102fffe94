"""A whole group without processes: real controller, real decode engine, two ranks' real sessions.

Messages travel encoded, in order on each link and in any order between links; answers to ranks
may be lost. Writes land late, break, or break and land all the same. The model knows which tokens
each page of both pools holds, so a page that is read too early, sent too late or reused too soon
shows at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
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

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.codecs import (
    DECODE_TO_CONTROLLER,
    DECODE_TO_RANK,
    FROM_RANK,
    FROM_SERVER,
    TO_DECODE,
    TO_RANK,
    TO_SERVER,
    encode,
)
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.decode import DecodeEngine
from cp_shared_kv.engine.decode_room import PrefillPeer
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    Admitted,
    BatchDone,
    Cancel,
    Paired,
    RoomConcluded,
    RoomRefused,
    RoomToken,
    Submit,
    Tokens,
)
from cp_shared_kv.engine.pairing import DecodePeer
from cp_shared_kv.engine.prefill import PrefillController
from cp_shared_kv.engine.request import Stage
from cp_shared_kv.engine.run_spec import PageLayout, RunSpec
from cp_shared_kv.engine.sampling.sampler import SampledToken
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages, Positions
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.transfer.actions import PrefillAction, ReleaseSources, SendMessage, SubmitWrite
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    FirstToken,
    Offer,
    OpenRoom,
    SamplingParams,
    Withdrawn,
)
from cp_shared_kv.transfer.prefill_session import PrefillSession, PrefillState

EPOCH, DECODE_EPOCH = 100, 200
DECODE = Life("decode", 0, 1)
PAGE_SIZE, CP_SIZE, VOCAB, EOS = 4, 2, 100, 14
Prompt = tuple[int, ...]


def first_token(prompt: Prompt) -> int:
    return 10 + sum(prompt) % 5


def page_content(prompt: Prompt, position: int) -> Prompt:
    """What a page holds once it is complete: all tokens up to its end decide its KV."""
    return prompt[: (position + 1) * PAGE_SIZE]


@dataclass
class Client:
    """One request as its client sees it."""

    prompt: Prompt
    max_tokens: int
    ignore_eos: bool
    cancelled: bool = False
    harmed: bool = False  # a write of it was broken, or decode could never hold it
    tokens: list[int] = field(default_factory=list[int])
    finish: str | None = None
    refusals: int = 0
    decode_ends: int = 0

    @property
    def over(self) -> bool:
        return self.finish is not None or self.refusals > 0

    def expected(self) -> tuple[list[int], str]:
        output: list[int] = []
        token = first_token(self.prompt)
        while True:
            output.append(token)
            if token == EOS and not self.ignore_eos:
                return output, "stop"
            if len(output) == self.max_tokens:
                return output, "length"
            token += 1


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

    def __init__(self, machine: DecodeMachine, rank: int) -> None:
        self.machine, self.rank = machine, rank
        self.layout = CpSharedKVLayout(
            PAGE_SIZE, CP_SIZE, rank, physical_pages=machine.physical_pages
        )
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
                    message.reservation(self.machine.decode_pages),
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
        machine = self.machine
        batch.validate(
            page_size=PAGE_SIZE, logical_pages=machine.pool.total_pages, vocab_size=VOCAB
        )
        tokens: list[RoomToken] = []
        for part in batch.requests:
            prompt = machine.clients[part.room].prompt
            stop = part.prefix_tokens + part.new_tokens
            pages = part.pages().tolist()
            for position in range(part.prefix_tokens // PAGE_SIZE):
                assert machine.prefill_content[pages[position]] == page_content(prompt, position)
            for position in range(part.prefix_tokens // PAGE_SIZE, len(pages)):
                content = page_content(prompt, position)[:stop]
                machine.prefill_content[pages[position]] = content
            if part.last and part.room % CP_SIZE == self.rank:
                tokens.append(RoomToken(room=part.room, token_id=first_token(prompt)))
        done = BatchDone(rank=self.rank, batch_id=batch.batch_id, tokens=tokens, scratch_bytes=0)
        machine.put(f"rank {self.rank}", "controller", done)
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
                    self.machine.put(f"rank {self.rank}", "decode", action.message)
                case ReleaseSources():
                    concluded = RoomConcluded(
                        rank=self.rank,
                        room=room,
                        pages=0,
                        descriptors=0,
                        bytes=0,
                        failure=session.failure,
                    )
                    self.machine.put(f"rank {self.rank}", "controller", concluded)
        session.check_invariants()
        if session.finished:
            del self.sessions[room]

    def land(self, write: Write) -> None:
        """The bytes arrive: the source must still be the prompt's, the destination the room's."""
        machine = self.machine
        self.writes.remove(write)
        prompt = machine.clients[write.room].prompt
        reserved = machine.decode_pool.pages(write.room).tolist()
        held = machine.pool.pages(write.room).tolist()
        for source, destination in zip(write.sources, write.destinations, strict=True):
            position = reserved.index(destination)
            assert held[position] == source
            assert machine.prefill_content[source] == page_content(prompt, position)
            machine.decode_content[destination] = page_content(prompt, position)
        if not write.stray:
            self.carry_out(
                write.room, self.sessions[write.room].write_done(write.chunk, 1, len(reserved))
            )

    def fail(self, write: Write, quiescent: bool) -> None:
        self.machine.clients[write.room].harmed = True
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


class DecodeMachine(RuleBasedStateMachine):
    @initialize(
        physical_pages=st.integers(3, 5),
        decode_pages=st.integers(5, 14),
        promised_pages=st.sampled_from([0, 0, 2]),
        chunk_tokens=st.integers(2, 16),
        max_running=st.integers(1, 3),
    )
    def start(
        self,
        physical_pages: int,
        decode_pages: int,
        promised_pages: int,
        chunk_tokens: int,
        max_running: int,
    ) -> None:
        self.physical_pages, self.decode_pages = physical_pages, decode_pages
        self.links: dict[tuple[str, str], deque[bytes]] = {}
        self.clients: dict[int, Client] = {}
        self.prefill_content: dict[int, Prompt] = {}
        self.decode_content: dict[int, Prompt] = {}
        # A prefill group that believes more than is true of decode has its offers declined.
        decode_tokens = (decode_pages + promised_pages) * PAGE_SIZE
        self.controller = PrefillController(
            self.run_spec(chunk_tokens, decode_tokens),
            epoch=EPOCH,
            to_server=lambda m: self.put("controller", "server", m),
            to_ranks=lambda m: [self.put("controller", f"rank {r}", m) for r in range(CP_SIZE)],
        )
        self.decode_peer = DecodePeer(
            DECODE, DECODE_EPOCH, send=lambda m: self.put("controller", "decode", m)
        )
        self.controller.paired(self.decode_peer)
        self.pool = self.controller.scheduler.pool
        self.decode_pool = LogicalPool(KVCapacity(decode_pages, PAGE_SIZE, 1), prefix_caching=False)
        self.decode = DecodeEngine(
            self.decode_pool,
            self,  # type: ignore[arg-type]
            epoch=DECODE_EPOCH,
            cp_size=CP_SIZE,
            max_running=max_running,
            quarantine_seconds=30.0,
            vocab_size=VOCAB,
            eos_token_ids=frozenset([EOS]),
            to_server=lambda m: self.put("decode", "server", m),
        )
        self.prefill_peer = PrefillPeer(
            Life("prefill", 0, 1),
            EPOCH,
            to_controller=lambda m: self.put("decode", "controller", m),
            to_rank=lambda r, m: self.put("decode", f"rank {r}", m),
        )
        self.max_running = max_running
        self.ranks = [Rank(self, rank) for rank in range(CP_SIZE)]
        self.next_room = 1

    def run_spec(self, chunk_tokens: int, decode_tokens: int) -> RunSpec:
        config = EngineConfig(
            model_path=Path("/models/tiny"),
            page_size=PAGE_SIZE,
            chunked_prefill_size=chunk_tokens,
            attention_context_parallel_size=CP_SIZE,
            enable_nsa_prefill_context_parallel=True,
            enable_nsa_prefill_cp_shared_kv=True,
        )
        return RunSpec(
            run_id="machine",
            run_dir="/nowhere",
            supervisor_pid=1,
            config=config.as_plain(),
            limits=EngineLimits(
                page_size=PAGE_SIZE,
                cp_size=CP_SIZE,
                shared=True,
                physical_tokens_per_rank=self.physical_pages * PAGE_SIZE,
                decode_tokens=decode_tokens,
                context_length=1000,
                scratch_limit_bytes=0,
                max_prefix_pages=3,
                pool_bytes_per_rank=0,
                decode_pool_bytes=0,
            ),
            page_layout=PageLayout(
                latent_format="l", index_format="i", num_layers=1, index_layers=(), bytes_per_page=1
            ),
            model_fingerprint="m",
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
        )

    # Links -----------------------------------------------------------------------------------

    def put(self, sender: str, receiver: str, message: msgspec.Struct) -> None:
        data = encode(message)
        if receiver == "server":
            self.on_server(sender, TO_SERVER.decode(data))
        else:
            self.links.setdefault((sender, receiver), deque()).append(data)

    def deliver(self, sender: str, receiver: str) -> None:
        data = self.links[sender, receiver].popleft()
        if receiver == "decode" and sender == "server":
            cancelled = FROM_SERVER.decode(data)
            assert isinstance(cancelled, Cancel)
            self.decode.cancel(cancelled.room, "the client went away")
        elif receiver == "decode":
            self.to_decode(TO_DECODE.decode(data))
        elif receiver == "controller":
            if sender == "decode":
                message = DECODE_TO_CONTROLLER.decode(data)
                self.controller.on_decode(self.decode_peer, message)  # type: ignore[arg-type]
            elif sender == "server":
                self.controller.on_server(FROM_SERVER.decode(data))
            else:
                self.controller.on_rank(FROM_RANK.decode(data))  # type: ignore[arg-type]
        else:
            rank = self.ranks[int(receiver[-1])]
            if sender == "controller":
                rank.handle(TO_RANK.decode(data))
            else:
                answer = DECODE_TO_RANK.decode(data)
                session = rank.sessions.get(answer.room)
                if session is not None:
                    rank.carry_out(answer.room, session.receive(answer))

    def to_decode(self, message: msgspec.Struct) -> None:
        match message:
            case Offer():
                self.decode.on_offer(self.prefill_peer, message)
            case FirstToken():
                self.decode.on_first_token(self.prefill_peer, message)
            case AbortRoom() | Withdrawn():
                self.decode.on_stop(self.prefill_peer, message)
            case _:
                self.decode.on_transfer(self.prefill_peer, message)  # type: ignore[arg-type]

    def waiting_links(self) -> list[tuple[str, str]]:
        return sorted(link for link, queue in self.links.items() if queue)

    @precondition(lambda self: self.waiting_links())
    @rule(data=st.data(), most=st.integers(1, 6))
    def one_link_moves(self, data: st.DataObject, most: int) -> None:
        link = data.draw(st.sampled_from(self.waiting_links()), label="link")
        for _ in range(min(most, len(self.links[link]))):
            self.deliver(*link)

    def all_links_move(self) -> None:
        for link in self.waiting_links():
            for _ in range(len(self.links[link])):
                self.deliver(*link)

    # Clients ---------------------------------------------------------------------------------

    @precondition(lambda self: len(self.unanswered()) < 6)
    @rule(
        prefix=st.integers(0, 24),
        tail=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        max_tokens=st.integers(1, 6),
        ignore_eos=st.booleans(),
    )
    def submit(self, prefix: int, tail: list[int], max_tokens: int, ignore_eos: bool) -> None:
        prompt = (*[1] * prefix, *tail)
        room = self.next_room
        self.next_room += 1
        self.clients[room] = Client(prompt, max_tokens, ignore_eos)
        pages = -(-(len(prompt) + max_tokens) // PAGE_SIZE)
        too_long = len(prompt) > self.pool.total_pages * PAGE_SIZE
        self.clients[room].harmed = too_long or pages > self.decode_pages
        submit = Submit(
            room=room,
            decode=str(DECODE),
            token_ids=pack_int64(np.array(prompt, np.int64)),
            max_tokens=max_tokens,
            sampling=SamplingParams(ignore_eos=ignore_eos),
        )
        self.put("server", "controller", submit)

    def unanswered(self) -> list[int]:
        return [room for room, client in self.clients.items() if not client.over]

    @precondition(lambda self: self.unanswered())
    @rule(data=st.data(), where=st.sampled_from([*Stage, None]))
    def cancel(self, data: st.DataObject, where: Stage | None) -> None:
        """A client goes away whose request is in this stage at prefill, or decode's alone."""
        stages = {r.room: r.stage for r in self.controller.scheduler.requests()}
        there = [room for room in self.unanswered() if stages.get(room) is where]
        if there:
            room = data.draw(st.sampled_from(there), label="room")
            self.clients[room].cancelled = True
            self.put("server", "controller", Cancel(room=room))
            self.put("server", "decode", Cancel(room=room))

    def on_server(self, sender: str, message: msgspec.Struct) -> None:
        if isinstance(message, Paired):
            return
        assert isinstance(message, Tokens | Admitted | RoomRefused)
        client = self.clients[message.room]
        if isinstance(message, Admitted):
            assert message.cached_tokens < len(client.prompt)
            return
        if sender == "decode":
            assert not client.decode_ends, "decode said something behind its last word"
        if isinstance(message, RoomRefused):
            client.refusals += 1
            client.decode_ends += sender == "decode"
            assert client.cancelled or client.harmed, message.reason
            return
        client.tokens += message.token_ids
        output, finish = client.expected()
        assert client.tokens == output[: len(client.tokens)]
        if message.finish_reason is not None:
            client.decode_ends += 1
            client.finish = message.finish_reason
            if message.finish_reason == "abort":
                assert client.cancelled
            else:
                assert (client.tokens, message.finish_reason) == (output, finish)

    # Steps -----------------------------------------------------------------------------------

    @rule(rounds=st.integers(1, 6), writes_land=st.booleans())
    def everyone_works(self, rounds: int, writes_land: bool) -> None:
        for _ in range(rounds):
            self.all_links_move()
            self.controller.step()
            if writes_land:
                self.all_writes_land()
            if self.decode.has_work:
                self.decode.step()

    @rule(data=st.data())
    def someone_works(self, data: st.DataObject) -> None:
        what = data.draw(st.sampled_from(["prefill", "decode", "writes"]), label="what")
        if what == "prefill":
            self.controller.step()
        elif what == "writes":
            self.all_writes_land()
        elif self.decode.has_work:
            self.decode.step()

    def execute(self, batch: Batch, sampling: dict[int, SamplingState]) -> dict[int, SampledToken]:
        """The engine's runner: a decode step may begin only on pages that have all arrived."""
        assert 0 < len(batch.requests) <= self.max_running
        batch.validate(page_size=PAGE_SIZE, logical_pages=self.decode_pages, vocab_size=VOCAB)
        for part in batch.requests:
            client = self.clients[part.room]
            assert part.prefix_tokens == len(client.prompt) + len(client.tokens) - 1
            assert sampling[part.room].position == len(client.tokens)
            for position in range(-(-len(client.prompt) // PAGE_SIZE)):
                page = int(part.pages()[position])
                assert self.decode_content[page] == page_content(client.prompt, position)
            # The tail page and those behind it are decode's own now.
        tokens = batch.tokens().tolist()
        return {
            part.room: SampledToken(token + 1)
            for part, token in zip(batch.requests, tokens, strict=True)
        }

    # Writes ----------------------------------------------------------------------------------

    def writes(self, stray: bool | None = None) -> list[tuple[Rank, Write]]:
        return [
            (rank, write)
            for rank in self.ranks
            for write in rank.writes
            if stray is None or write.stray == stray
        ]

    @precondition(lambda self: self.writes())
    @rule(data=st.data())
    def a_write_lands(self, data: st.DataObject) -> None:
        writes = self.writes()
        rank, write = writes[data.draw(st.integers(0, len(writes) - 1), label="write")]
        rank.land(write)

    def all_writes_land(self) -> None:
        for rank, write in self.writes(stray=False):
            rank.land(write)

    @precondition(lambda self: self.writes(stray=False))
    @rule(data=st.data(), quiescent=st.booleans())
    def a_write_breaks(self, data: st.DataObject, quiescent: bool) -> None:
        writes = self.writes(stray=False)
        rank, write = writes[data.draw(st.integers(0, len(writes) - 1), label="write")]
        rank.fail(write, quiescent)

    @precondition(lambda self: self.writes(stray=True))
    @rule()
    def failed_rooms_are_drained(self) -> None:
        for rank in self.ranks:
            for room, session in list(rank.sessions.items()):
                if session.state is PrefillState.DRAINING:
                    rank.drain(room)

    @precondition(lambda self: any(rank.sessions for rank in self.ranks))
    @rule()
    def the_ranks_repeat_themselves(self) -> None:
        for rank in self.ranks:
            for room, session in list(rank.sessions.items()):
                rank.carry_out(room, session.resend_due())

    @precondition(lambda self: self.rank_links())
    @rule()
    def acknowledgements_are_lost(self) -> None:
        for link in self.rank_links():
            self.links[link].clear()

    def rank_links(self) -> list[tuple[str, str]]:
        """Those that carry answers of decode to ranks now."""
        return [(a, b) for a, b in self.waiting_links() if a == "decode" and b != "controller"]

    # Always ----------------------------------------------------------------------------------

    @invariant()
    def the_books_balance(self) -> None:
        self.controller.scheduler.check_invariants()
        self.decode.check_invariants()

    def teardown(self) -> None:
        """Let everything run to its end: each request is answered and every page comes back."""
        if not hasattr(self, "pool"):
            return
        quiet = 0
        for _ in range(2000):
            if quiet == 2:
                break
            if quiet:
                self.the_ranks_repeat_themselves()
            self.all_links_move()
            self.all_writes_land()
            self.failed_rooms_are_drained()
            moved = self.controller.step()
            if self.decode.has_work:
                self.decode.step()
                moved = True
            quiet = 0 if moved or self.waiting_links() or self.writes() else quiet + 1
        assert quiet == 2, "it does not come to rest"
        self.the_books_balance()
        for room, client in self.clients.items():
            assert client.over, f"room {room} was never answered"
            assert client.decode_ends <= 1
            if not client.cancelled and not client.harmed:
                assert client.finish in ("stop", "length")
        assert not list(self.controller.scheduler.requests())
        assert not any(rank.sessions for rank in self.ranks)
        assert self.pool.locked_pages == 0
        assert self.decode_pool.available_pages == self.decode_pages
        stats = self.decode.stats(1)
        assert (stats.waiting, stats.running) == (0, 0)


TestDecodeMachine = DecodeMachine.TestCase
TestDecodeMachine.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

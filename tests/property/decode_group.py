"""A whole group without processes: real controller, real decode engine, two ranks' sessions."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

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
from cp_shared_kv.engine.decode import DecodeEngine
from cp_shared_kv.engine.decode_room import PrefillPeer
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import Admitted, Cancel, Paired, RoomRefused, Submit, Tokens
from cp_shared_kv.engine.pairing import DecodePeer
from cp_shared_kv.engine.prefill import PrefillController
from cp_shared_kv.engine.sampling.sampler import SampledToken
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.testing.bare_run_spec import bare_run_spec
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import AbortRoom, FirstToken, Offer, SamplingParams, Withdrawn
from cp_shared_kv.transfer.prefill_session import PrefillState

from .decode_model import (
    CP_SIZE,
    DECODE,
    DECODE_EPOCH,
    EOS,
    EPOCH,
    PAGE_SIZE,
    VOCAB,
    Books,
    Client,
    Prompt,
    page_content,
)
from .decode_ranks import Rank, Write


class Group:
    """The processes of a group and its decode worker, and the links between them."""

    def __init__(
        self,
        physical_pages: int,
        decode_pages: int,
        promised_pages: int,
        chunk_tokens: int,
        max_running: int,
    ) -> None:
        self.decode_pages, self.max_running = decode_pages, max_running
        self.links: dict[tuple[str, str], deque[bytes]] = {}
        # A prefill group that believes more than is true of decode has its offers declined.
        decode_tokens = (decode_pages + promised_pages) * PAGE_SIZE
        self.controller = PrefillController(
            bare_run_spec(
                page_size=PAGE_SIZE,
                cp_size=CP_SIZE,
                chunk_tokens=chunk_tokens,
                physical_pages=physical_pages,
                decode_tokens=decode_tokens,
                context_length=1000,
                max_prefix_pages=3,
                vocab_size=VOCAB,
                eos_token_id=EOS,
            ),
            epoch=EPOCH,
            to_server=lambda m: self.put("controller", "server", m),
            to_ranks=self.to_ranks,
        )
        self.decode_peer = DecodePeer(
            DECODE, DECODE_EPOCH, send=lambda m: self.put("controller", "decode", m)
        )
        self.controller.paired(self.decode_peer)
        decode_pool = LogicalPool(KVCapacity(decode_pages, PAGE_SIZE, 1), prefix_caching=False)
        self.books = Books(self.controller.scheduler.pool, decode_pool)
        self.decode = DecodeEngine(
            decode_pool,
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
        self.ranks = [Rank(rank, physical_pages, self.books, self.put) for rank in range(CP_SIZE)]

    # Links -----------------------------------------------------------------------------------

    def put(self, sender: str, receiver: str, message: msgspec.Struct) -> None:
        data = encode(message)
        if receiver == "server":
            self.on_server(sender, TO_SERVER.decode(data))
        else:
            self.links.setdefault((sender, receiver), deque()).append(data)

    def to_ranks(self, message: msgspec.Struct) -> None:
        for rank in range(CP_SIZE):
            self.put("controller", f"rank {rank}", message)

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

    def all_links_move(self) -> None:
        for link in self.waiting_links():
            for _ in range(len(self.links[link])):
                self.deliver(*link)

    def rank_links(self) -> list[tuple[str, str]]:
        """Those that carry answers of decode to ranks now."""
        return [(a, b) for a, b in self.waiting_links() if a == "decode" and b != "controller"]

    # Clients ---------------------------------------------------------------------------------

    @property
    def clients(self) -> dict[int, Client]:
        return self.books.clients

    def submit(self, prompt: Prompt, max_tokens: int, ignore_eos: bool) -> None:
        room = len(self.clients) + 1
        self.clients[room] = Client(prompt, max_tokens, ignore_eos)
        pages = -(-(len(prompt) + max_tokens) // PAGE_SIZE)
        too_long = len(prompt) > self.books.pool.total_pages * PAGE_SIZE
        self.clients[room].harmed = too_long or pages > self.decode_pages
        submit = Submit(
            room=room,
            decode=str(DECODE),
            token_ids=pack_int64(np.array(prompt, np.int64)),
            max_tokens=max_tokens,
            sampling=SamplingParams(ignore_eos=ignore_eos),
        )
        self.put("server", "controller", submit)

    def cancel(self, room: int) -> None:
        self.clients[room].cancelled = True
        self.put("server", "controller", Cancel(room=room))
        self.put("server", "decode", Cancel(room=room))

    def unanswered(self) -> list[int]:
        return [room for room, client in self.clients.items() if not client.over]

    def on_server(self, sender: str, message: msgspec.Struct) -> None:
        if isinstance(message, Paired):
            return
        assert isinstance(message, Tokens | Admitted | RoomRefused)
        self.clients[message.room].hear(sender, message)

    # Steps -----------------------------------------------------------------------------------

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
                assert self.books.decode_content[page] == page_content(client.prompt, position)
            # The tail page and those behind it are decode's own now.
        tokens = batch.tokens().tolist()
        return {
            part.room: SampledToken(token + 1)
            for part, token in zip(batch.requests, tokens, strict=True)
        }

    def writes(self, stray: bool | None = None) -> list[tuple[Rank, Write]]:
        return [
            (rank, write)
            for rank in self.ranks
            for write in rank.writes
            if stray is None or write.stray == stray
        ]

    def all_writes_land(self) -> None:
        for rank, write in self.writes(stray=False):
            rank.land(write)

    def failed_rooms_are_drained(self) -> None:
        for rank in self.ranks:
            for room, session in list(rank.sessions.items()):
                if session.state is PrefillState.DRAINING:
                    rank.drain(room)

    def the_ranks_repeat_themselves(self) -> None:
        for rank in self.ranks:
            for room, session in list(rank.sessions.items()):
                rank.carry_out(room, session.resend_due())

    def the_books_balance(self) -> None:
        self.controller.scheduler.check_invariants()
        self.decode.check_invariants()

    def settle(self) -> None:
        """Let everything run to its end: each request is answered and every page comes back."""
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
        assert self.books.pool.locked_pages == 0
        assert self.books.decode_pool.available_pages == self.decode_pages
        stats = self.decode.stats(1)
        assert (stats.waiting, stats.running) == (0, 0)

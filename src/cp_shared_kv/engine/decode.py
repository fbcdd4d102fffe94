"""The decode worker: sets pages aside, waits for exact cover, and generates tokens.

One process, one model replica, its own pool. All requests that run share each forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from cp_shared_kv.engine.api import FinishReason
from cp_shared_kv.engine.batch import Batch, BatchRequest
from cp_shared_kv.engine.codecs import encode
from cp_shared_kv.engine.messages import DecodeStats, RoomRefused, Tokens
from cp_shared_kv.engine.model_runner import ModelRunner
from cp_shared_kv.engine.recording import MessageLog
from cp_shared_kv.engine.sampling.sampler import SampledToken
from cp_shared_kv.engine.sampling.state import SamplingState, prompt_tokens_for_sampling
from cp_shared_kv.errors import CapacityError, InvariantError, ProtocolError
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.memory.page_keys import page_keys
from cp_shared_kv.transfer.actions import (
    Covered,
    DecodeAction,
    FreePages,
    RoomFailed,
    SendMessage,
)
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.decode_session import DecodeSession, DecodeState, acknowledgement
from cp_shared_kv.transfer.descriptors import stripe_destinations
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Acknowledged,
    Concluded,
    Declined,
    FirstToken,
    Offer,
    Quiesced,
    Reserve,
    Sent,
    Withdrawn,
)
from cp_shared_kv.transfer.reservation import Reservation

logger = logging.getLogger("cp_shared_kv")
SendTo = Callable[[msgspec.Struct], None]


@dataclass
class DecodeRoom:
    """One request at decode, from its offer to its last token."""

    offer: Offer
    prompt_tokens: int
    sampling: SamplingState
    logical_pages: LogicalPages | None = None
    session: DecodeSession | None = None
    first_token: SampledToken | None = None
    stopped: bool = False
    """Somebody wants it no more: its failure is nobody's fault."""
    generated: list[int] = field(default_factory=list[int])


class DecodeEngine:
    """Logic of a decode worker. `to_controller`, `to_rank`, `to_server` send; nothing blocks."""

    def __init__(
        self,
        pool: LogicalPool,
        runner: ModelRunner,
        *,
        epoch: int,
        cp_size: int,
        max_running: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        to_controller: SendTo,
        to_rank: Callable[[int, msgspec.Struct], None],
        to_server: SendTo,
        log: MessageLog | None = None,
    ) -> None:
        self._pool = pool
        self._runner = runner
        self._epoch = epoch
        self.prefill_epoch = 0
        self._cp_size = cp_size
        self._max_running = max_running
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._to_controller, self._to_rank, self._to_server = to_controller, to_rank, to_server
        self._log = log
        self._rooms: dict[int, DecodeRoom] = {}
        self._waiting: list[int] = []
        self._running: list[int] = []
        self._next_batch_id = 0
        self.generated_total = 0
        self.finished_total = 0
        self.failed_total = 0

    # Events -----------------------------------------------------------------------------------

    def on_offer(self, offer: Offer) -> None:
        """Queue an offer; it is reserved as soon as its pages are free, in order of arrival."""
        self._check_epochs(offer)
        if offer.room in self._rooms:
            return
        try:
            sampling = SamplingState(
                offer.sampling,
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos,
                prompt_token_ids=prompt_tokens_for_sampling(offer.sampling, offer.tokens()),
            )
        except ProtocolError as error:
            self._decline(offer.room, str(error))
            return
        self._rooms[offer.room] = DecodeRoom(offer, len(offer.token_ids) // 8, sampling)
        self._waiting.append(offer.room)
        self._reserve_waiting()

    def on_transfer(self, message: Sent | Concluded | Quiesced) -> None:
        """A rank reports on its part of a room."""
        room = self._rooms.get(message.room)
        if room is not None and room.session is not None:
            self._carry_out(message.room, room.session.receive(message))
        elif not isinstance(message, Sent):
            # The room is over and the rank has not heard our answer: give it again.
            self._check_epochs(message)
            self._to_rank(message.rank, acknowledgement(message))

    def on_first_token(self, message: FirstToken) -> None:
        """The token that prefill's logits chose."""
        self._check_epochs(message)
        if message.token_id >= self._vocab_size:
            raise ProtocolError(
                f"the first token of room {message.room} is not in the vocabulary",
                value=message.token_id,
                allowed=f"0 to {self._vocab_size - 1}",
            )
        room = self._rooms.get(message.room)
        if room is not None and room.first_token is None:
            room.first_token = SampledToken(message.token_id, message.logprobs)
            self._start_if_ready(message.room)

    def on_stop(self, message: AbortRoom | Withdrawn) -> None:
        """The request is wanted no more; its pages go when no rank can still write them."""
        self._check_epochs(message)
        room = self._rooms.get(message.room)
        if room is None:
            return
        room.stopped = True
        if message.room in self._running:
            self._finish(Tokens(room=message.room, token_ids=[], finish_reason="abort"))
        elif room.session is None:
            self._waiting.remove(message.room)
            del self._rooms[message.room]
            self._reserve_waiting()  # it may have been what held the others up
        elif room.session.state is DecodeState.COVERED:
            self._release(message.room)  # only its first token was missing
        else:
            self._carry_out(message.room, room.session.receive(message))

    def _check_epochs(
        self, message: Offer | FirstToken | AbortRoom | Withdrawn | Concluded | Quiesced
    ) -> None:
        message.check_address(room=message.room, sender=self.prefill_epoch, receiver=self._epoch)

    # Steps ------------------------------------------------------------------------------------

    @property
    def open_rooms(self) -> int:
        """Rooms that are offered, receiving or decoding."""
        return len(self._rooms)

    @property
    def has_work(self) -> bool:
        """Whether a decode step would do anything."""
        return bool(self._running)

    def step(self) -> None:
        """One token for every running request."""
        chosen = self._running[: self._max_running]
        parts: list[BatchRequest] = []
        tokens: list[int] = []
        for name in chosen:
            room = self._rooms[name]
            assert room.logical_pages is not None
            stored = room.prompt_tokens + len(room.generated) - 1
            pages = room.logical_pages[: stored // self._pool.page_size + 1]
            parts.append(
                BatchRequest(
                    room=name,
                    prefix_tokens=stored,
                    new_tokens=1,
                    logical_pages=pack_int64(pages),
                    last=True,
                )
            )
            tokens.append(room.generated[-1])
        self._next_batch_id += 1
        batch = Batch(
            epoch=self._epoch,
            batch_id=self._next_batch_id,
            token_ids=pack_int64(np.asarray(tokens, dtype=np.int64)),
            requests=parts,
        )
        self._record(batch)
        sampling = {name: self._rooms[name].sampling for name in chosen}
        for name, token in self._runner.execute(batch, sampling).items():
            self._emit(name, token)

    def stats(self, ticket: int) -> DecodeStats:
        """Figures of this worker, in tokens."""
        page = self._pool.page_size
        return DecodeStats(
            ticket=ticket,
            available_tokens=self._pool.available_pages * page,
            used_tokens=self._pool.locked_pages * page,
            waiting=len(self._waiting),
            running=len(self._running),
            generated_tokens_total=self.generated_total,
            finished_total=self.finished_total,
            failed_rooms_total=self.failed_total,
        )

    def check_invariants(self) -> None:
        """Raise `InvariantError` if rooms, sessions and the pool disagree."""
        self._pool.check_invariants()
        holding = {name for name, room in self._rooms.items() if room.logical_pages is not None}
        if set(self._pool.rooms) != holding:
            raise InvariantError("decode rooms that hold pages are not those of the pool")
        for room in self._rooms.values():
            if room.session is not None:
                room.session.check_invariants()

    # Reservation ------------------------------------------------------------------------------

    def _reserve_waiting(self) -> None:
        while self._waiting:
            name = self._waiting[0]
            room = self._rooms[name]
            tokens = room.prompt_tokens + room.offer.max_tokens
            prompt_pages = -(-room.prompt_tokens // self._pool.page_size)
            try:
                admission = self._pool.admit(
                    name,
                    page_keys(room.offer.tokens(), self._pool.page_size),
                    -(-tokens // self._pool.page_size),
                    arrange=partial(self._striped, prompt_pages),
                )
            except CapacityError as error:
                self._waiting.pop(0)
                del self._rooms[name]
                self._decline(name, str(error))
                continue
            if admission is None:
                return
            self._waiting.pop(0)
            room.logical_pages = admission.logical_pages
            # What decode holds already is not asked for. It does not share its pool, so its
            # logical pages are its physical ones.
            held = admission.cached_pages
            physical_pages = PhysicalPages(admission.logical_pages[held:prompt_pages])
            room.session = DecodeSession(
                room=name,
                epoch=self._epoch,
                peer_epoch=self.prefill_epoch,
                cp_size=self._cp_size,
                reservation=Reservation(first_position=held, physical_pages=physical_pages),
            )
            reserve = Reserve(
                epoch=self._epoch,
                peer_epoch=self.prefill_epoch,
                room=name,
                first_position=held,
                physical_pages=pack_int64(physical_pages),
            )
            self._record(reserve)
            self._to_controller(reserve)

    def _striped(self, prompt_pages: int, drawn: LogicalPages, first_position: int) -> LogicalPages:
        """Lay out what prefill will send so that each owner's pages lie together."""
        sent = max(0, prompt_pages - first_position)
        striped = stripe_destinations(PhysicalPages(drawn[:sent]), first_position, self._cp_size)
        return LogicalPages(np.concatenate([striped, drawn[sent:]]))

    def _publish(self, room: DecodeRoom) -> None:
        """Keep the pages that are written, prompt and output, for the prompts that go on from here.

        The last token's own KV was never computed: no step followed it.
        """
        tokens = np.append(room.offer.tokens(), np.asarray(room.generated[:-1], dtype=np.int64))
        self._pool.publish(room.offer.room, page_keys(tokens, self._pool.page_size))

    def _decline(self, name: int, reason: str) -> None:
        self._to_controller(
            Declined(epoch=self._epoch, peer_epoch=self.prefill_epoch, room=name, reason=reason)
        )

    # Actions of the sessions ------------------------------------------------------------------

    def _carry_out(self, name: int, actions: list[DecodeAction]) -> None:
        for action in actions:
            match action:
                case SendMessage():
                    if isinstance(action.message, Acknowledged):
                        self._to_rank(action.message.rank, action.message)
                    else:
                        self._to_controller(action.message)
                case Covered():
                    self._start_if_ready(name)
                case RoomFailed():
                    self.failed_total += not self._rooms[name].stopped
                    self._to_server(RoomRefused(room=name, kind="failed", reason=action.reason))
                case FreePages():
                    self._release(name)

    def _start_if_ready(self, name: int) -> None:
        room = self._rooms[name]
        if (
            room.first_token is None
            or room.session is None
            or room.session.state is not DecodeState.COVERED
        ):
            return
        self._record(
            FirstToken(
                epoch=self._epoch,
                peer_epoch=self.prefill_epoch,
                room=name,
                token_id=room.first_token.token_id,
            )
        )
        self._running.append(name)
        self._emit(name, room.first_token)

    # Output -----------------------------------------------------------------------------------

    def _emit(self, name: int, token: SampledToken) -> None:
        room = self._rooms[name]
        room.generated.append(token.token_id)
        self.generated_total += 1
        stop = room.sampling.append(token.token_id)
        full = len(room.generated) >= room.offer.max_tokens
        reason: FinishReason | None = "stop" if stop else "length" if full else None
        told = Tokens(
            room=name,
            token_ids=[token.token_id],
            finish_reason=reason,
            logprobs=None if token.logprobs is None else [token.logprobs],
        )
        if reason is None:
            self._to_server(told)
        else:
            self._finish(told)

    def _finish(self, last: Tokens) -> None:
        self._running.remove(last.room)
        self._publish(self._rooms[last.room])
        self.finished_total += 1
        self._to_server(last)
        self._release(last.room)

    def _release(self, name: int) -> None:
        if self._rooms.pop(name, None) is not None:
            self._pool.release(name)
            self._reserve_waiting()

    def _record(self, message: msgspec.Struct) -> None:
        if self._log is not None:
            self._log.append(encode(message))

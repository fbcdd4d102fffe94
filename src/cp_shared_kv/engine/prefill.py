"""The prefill controller: owns all logical state of its group and drives the ranks.

One process, one thread, no torch. The effects are here; what to run next is the scheduler's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from cp_shared_kv.engine.api import EngineRefusal
from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.codecs import RECORDED, FromServer
from cp_shared_kv.engine.group_figures import GroupFigures
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    NO_NUMBERS,
    Admitted,
    BatchDone,
    Cancel,
    Check,
    Checked,
    Flush,
    Flushed,
    PageMapRequest,
    Paired,
    RankState,
    Registered,
    RoomConcluded,
    RoomRefused,
    RoomToken,
    StatsRequest,
    Submit,
)
from cp_shared_kv.engine.page_maps import told_page_map
from cp_shared_kv.engine.pairing import DecodePeer
from cp_shared_kv.engine.rank_reports import RankReports
from cp_shared_kv.engine.rank_states import RankStates
from cp_shared_kv.engine.recording import MessageLog
from cp_shared_kv.engine.request import PrefillRequest
from cp_shared_kv.engine.request_ends import RequestEnds
from cp_shared_kv.engine.room_opening import opened_room
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.engine.scheduler import PrefillScheduler
from cp_shared_kv.engine.self_check import broken
from cp_shared_kv.engine.submission import checked_offer
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.memory.page_keys import page_keys
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Declined,
    FirstToken,
    Offer,
    OpenRoom,
    Released,
    Reserve,
    as_reason,
)

logger = logging.getLogger("cp_shared_kv")
Send = Callable[[msgspec.Struct], None]


class PrefillController:
    """Logic of the controller. `to_server` and `to_ranks` (all of them) send.

    Every method takes one decoded message, or news of another process, and may send; nothing here
    blocks.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        epoch: int,
        to_server: Send,
        to_ranks: Send,
    ) -> None:
        config = spec.engine_config()
        limits = spec.limits
        self._to_server, self._to_ranks = to_server, to_ranks
        self._epoch = epoch
        self._peers: dict[str, DecodePeer] = {}
        """The decode workers that can be sent to, by life."""
        self._limits = limits
        self._vocab_size = spec.vocab_size
        self._pool = LogicalPool(limits.capacity, prefix_caching=not config.disable_radix_cache)
        self.scheduler = PrefillScheduler(
            self._pool,
            group_ranks=limits.cp_size,
            chunk_tokens=config.chunked_prefill_size,
            max_prefix_pages=limits.max_prefix_pages,
            epoch=epoch,
        )
        self._figures = GroupFigures(limits.cp_size)
        self._ends = RequestEnds(self.scheduler, to_server=to_server, to_ranks=to_ranks)
        self._reports = RankReports(self.scheduler, limits.cp_size)
        self._rank_states = RankStates(lambda room: self.scheduler.get(room) is not None)
        self._max_queued = config.max_queued_requests
        self._log = None
        if config.record_batches is not None:
            self._log = MessageLog(Path(config.record_batches) / "prefill.messages")

    # News of other processes -----------------------------------------------------------------

    def paired(self, peer: DecodePeer) -> None:
        """All ranks can write to this decode worker: prompts for it may come."""
        self._peers[str(peer.life)] = peer
        self._to_server(Paired(decode=str(peer.life)))

    def introduce(self) -> None:
        """Tell a server that has just come who this is, and where it can send."""
        self._to_server(Registered())
        for life in self._peers:
            self._to_server(Paired(decode=life))

    def decode_lost(self, life: Life, reason: str) -> None:
        """A decode worker's process is gone, and its requests with it."""
        peer = self._peers.pop(str(life), None)
        if peer is not None:
            self._ends.decode_lost(peer, reason)

    def server_lost(self, reason: str) -> None:
        """Nobody waits for any answer any more."""
        self._ends.abort_all(reason)

    # From the server --------------------------------------------------------------------------

    def on_server(self, message: FromServer) -> None:
        """A new prompt, a room that is cancelled, a question, or the cache is to go."""
        match message:
            case Submit():
                self._submit(message)
            case Cancel():
                self._ends.abort(message.room, "the client went away")
            case StatsRequest():
                self._to_server(self._figures.stats(message.ticket, self.scheduler))
            case PageMapRequest():
                self._to_server(told_page_map(message, self._pool, self._epoch))
            case Check():
                self._to_server(Checked(ticket=message.ticket, problems=self.problems()))
            case Flush():
                self._to_server(Flushed(ticket=message.ticket, pages=self._pool.clear()))

    def _submit(self, message: Submit) -> None:
        if self.scheduler.get(message.room) is not None:
            raise ProtocolError("room is already open", value=message.room)
        try:
            decode, offer = self._offer(message)
        except EngineRefusal as refusal:
            self._to_server(
                RoomRefused(room=message.room, kind=refusal.kind, reason=as_reason(refusal.reason))
            )
            return
        tokens = offer.tokens()
        self.scheduler.submit(
            PrefillRequest(
                room=message.room,
                decode=decode,
                token_ids=tokens,
                max_tokens=message.max_tokens,
                sampling=message.sampling,
                page_keys=page_keys(tokens, self._limits.page_size),
            )
        )
        decode.send(offer)

    def _offer(self, message: Submit) -> tuple[DecodePeer, Offer]:
        decode = self._peers.get(message.decode)
        if decode is None:
            raise EngineRefusal(
                f"decode worker {message.decode} is not connected to this group",
                kind="unavailable",
            )
        if self._max_queued is not None and self.scheduler.queued >= self._max_queued:
            raise EngineRefusal(
                f"{self.scheduler.queued} requests are waiting, which is as many as may "
                "(--max-queued-requests); try again later",
                kind="overloaded",
            )
        return decode, checked_offer(
            message,
            epoch=self._epoch,
            peer_epoch=decode.epoch,
            limits=self._limits,
            vocab_size=self._vocab_size,
        )

    # From decode ------------------------------------------------------------------------------

    def on_decode(
        self, peer: DecodePeer, message: Reserve | Declined | Released | AbortRoom
    ) -> None:
        """A decode worker's answers to offers, and the end of rooms. An earlier life is refused."""
        if message.epoch != peer.epoch or message.peer_epoch != self._epoch:
            raise ProtocolError("message of another epoch", value=type(message).__name__)
        request = self.scheduler.get(message.room)
        if request is not None and request.decode is not peer:
            raise ProtocolError(
                f"{peer.life} speaks of a room of {request.decode.life}", value=message.room
            )
        match message:
            case Reserve():
                self._reserved(peer, request, message)
            case Declined() | AbortRoom():
                if request is None:
                    self._ends.withdraw(
                        peer, message.room, "prefill has nothing to do with it any more"
                    )
                else:
                    self._ends.abort(message.room, message.reason)
            case Released():
                pass  # the ranks' own conclusions already released the prefill pages

    def _reserved(self, peer: DecodePeer, request: PrefillRequest | None, message: Reserve) -> None:
        if request is None:
            self._ends.withdraw(peer, message.room, "it was aborted before it began")
            return
        try:
            opened = opened_room(message, request, self._limits)
        except ValueError as error:
            self._ends.abort(message.room, f"decode's reservation is malformed: {error}")
            return
        self.scheduler.reserved(opened)

    # From the ranks ---------------------------------------------------------------------------

    def on_rank(self, message: BatchDone | RoomConcluded | RankState) -> None:
        """A rank finished a batch, or its part of a transfer, or says how it is."""
        self._reports.check_rank(message.rank)
        match message:
            case BatchDone():
                self._batch_done(message)
            case RoomConcluded():
                self._room_concluded(message)
            case RankState():
                self._rank_states.take(message)

    def _batch_done(self, message: BatchDone) -> None:
        done = self._reports.batch_done(message)
        self._figures.computed(message)
        if not done:
            return
        without = {room for one in done for room in one.without_token}
        completed, gone = self.scheduler.batch_done(message.batch_id, without)
        decodes = {request.room: request.decode for request in completed}
        for room in sorted(without & decodes.keys()):
            del decodes[room]
            logger.error("room %d: %s", room, NO_NUMBERS)
            self._ends.abort(room, NO_NUMBERS)
        for one in done:
            for token in one.tokens:
                if token.room in decodes:
                    self._first_token(decodes[token.room], token)
        for request in gone:
            self._ends.gone(request)

    def _first_token(self, decode: DecodePeer, token: RoomToken) -> None:
        if token.token_id >= self._vocab_size:
            self._ends.abort(
                token.room, f"a rank chose token {token.token_id}, which does not exist"
            )
            return
        decode.send(
            FirstToken(
                epoch=self._epoch,
                peer_epoch=decode.epoch,
                room=token.room,
                token_id=token.token_id,
                logprobs=token.logprobs,
            )
        )

    def _room_concluded(self, message: RoomConcluded) -> None:
        request = self._reports.room_concluded(message)
        self._figures.concluded(message)
        if message.failure is not None and request.failure is None:
            # Without this rank's part all is in vain.
            self._ends.abort(message.room, message.failure)
        over = self.scheduler.concluded(message.room, message.rank)
        if over is not None:
            self._ends.gone(over)

    # Steps ------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """What does not add up in the books here and at the ranks."""
        return broken([self.scheduler.check_invariants]) + self._rank_states.problems()

    def step(self) -> bool:
        """Start the next batch if there is one and none is in flight."""
        planned = self.scheduler.next_batch()
        if planned is None:
            return False
        batch, admitted = planned
        for request in admitted:
            assert request.reservation is not None
            self._record(request.reservation)
            self._to_ranks(request.reservation)
            self._to_server(Admitted(room=request.room, cached_tokens=request.cached_tokens))
        self._record(batch)
        self._to_ranks(batch)
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d",
            len(admitted),
            sum(r.new_tokens for r in batch.requests),
            sum(r.cached_tokens for r in admitted),
            self._pool.locked_pages / self._pool.total_pages,
            self.scheduler.running,
            self.scheduler.queued,
        )
        return True

    def _record(self, message: OpenRoom | Batch) -> None:
        if self._log is not None:
            self._log.append(RECORDED.encode(message))

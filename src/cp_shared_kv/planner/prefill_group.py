"""A prefill group in simulated time: the engine's own scheduler and pool, with no model behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.pairing import DecodePeer
from cp_shared_kv.engine.request import PrefillRequest
from cp_shared_kv.engine.scheduler import PrefillScheduler
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.planner.clock import EventClock
from cp_shared_kv.planner.cost_model import CostModel, Span
from cp_shared_kv.planner.decode_side import DecodeSide
from cp_shared_kv.planner.simulated_request import SimulatedRequest
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import OpenRoom
from cp_shared_kv.transfer.sampling_params import SamplingParams

_ANY_TOKEN = np.zeros((), np.int64)
_NOBODY = DecodePeer(Life("decode", 0, 1), 1, lambda _: None)
_EPOCH = 1


@dataclass(frozen=True, slots=True)
class GroupHooks:
    """What a group tells: a request's pages were drawn, or decode has all of its prompt."""

    admitted: Callable[[SimulatedRequest, LogicalPages], None]
    prefilled: Callable[[SimulatedRequest], None]


@dataclass(slots=True)
class GroupFigures:
    """What a group has done."""

    busy_seconds: float = 0.0
    batches: int = 0


class PrefillGroup:
    """One group. `owners` ranks share its pool; `decode` is left out where decode never waits."""

    def __init__(
        self,
        clock: EventClock,
        capacity: KVCapacity,
        costs: CostModel,
        hooks: GroupHooks,
        *,
        chunk_tokens: int,
        max_prefix_pages: int,
        decode: DecodeSide | None = None,
    ) -> None:
        self.pool = LogicalPool(capacity)
        self.scheduler = PrefillScheduler(
            self.pool,
            group_ranks=capacity.cp_size,
            chunk_tokens=chunk_tokens,
            max_prefix_pages=max_prefix_pages,
            epoch=_EPOCH,
        )
        self.figures = GroupFigures()
        self._clock, self._costs, self._hooks = clock, costs, hooks
        self._ranks = capacity.cp_size
        self._decode = decode
        self._open: dict[int, SimulatedRequest] = {}

    def submit(self, request: SimulatedRequest) -> None:
        """Take a request that fits the pool."""
        self._open[request.room] = request
        self.scheduler.submit(
            PrefillRequest(
                room=request.room,
                decode=_NOBODY,
                token_ids=np.broadcast_to(_ANY_TOKEN, request.prompt_tokens),
                max_tokens=max(1, request.output_tokens),
                sampling=SamplingParams(),
                page_keys=request.page_keys,
            )
        )
        if self._decode is None:
            self._reserved(request, 0)
        else:
            self._decode.offer(request, lambda held: self._reserved(request, held))

    def answered(self, request: SimulatedRequest) -> None:
        """Decode is done with it."""
        if self._decode is not None:
            self._decode.finish(request)

    def check_invariants(self) -> None:
        """InvariantError if the books of scheduler, pool or decode do not balance."""
        self.scheduler.check_invariants()
        if self._decode is not None:
            self._decode.check_invariants()

    def _reserved(self, request: SimulatedRequest, held_pages: int) -> None:
        pages = -(-request.prompt_tokens // self.pool.page_size)
        self.scheduler.reserved(
            OpenRoom(
                epoch=_EPOCH,
                room=request.room,
                decode_epoch=_EPOCH,
                first_position=held_pages,
                # Where they land is decode's matter; a scheduler only counts them.
                physical_pages=pack_int64(np.arange(1, pages - held_pages + 1)),
                total_positions=pages,
            )
        )
        self._step()

    def _step(self) -> None:
        planned = self.scheduler.next_batch()
        if planned is None:
            return
        batch, admitted = planned
        for started in admitted:
            request = self._open[started.room]
            request.admitted_seconds = self._clock.now_seconds
            request.cached_tokens = started.cached_tokens
            assert started.logical_pages is not None
            self._hooks.admitted(request, started.logical_pages)
        spans = [Span(part.prefix_tokens, part.new_tokens) for part in batch.requests]
        seconds = self._costs.batch(spans, self._prefix_tokens(batch)).total
        self.figures.busy_seconds += seconds
        self.figures.batches += 1
        self._clock.at(self._clock.now_seconds + seconds, lambda: self._computed(batch))

    def _prefix_tokens(self, batch: Batch) -> int:
        """Tokens of the batch's prefixes, each shared page once."""
        if len(batch.requests) == 1:
            return batch.requests[0].prefix_tokens
        page_size = self.pool.page_size
        prefixes = [part.pages()[: -(-part.prefix_tokens // page_size)] for part in batch.requests]
        return page_size * len(np.unique(np.concatenate(prefixes)))

    def _computed(self, batch: Batch) -> None:
        self.scheduler.batch_done(batch.batch_id)
        for part in batch.requests:
            request = self._open[part.room]
            sent = part.send_stop - part.send_start
            if self._decode is not None:
                self._decode.sent(request, part)
            elif part.send_start == 0:
                # Without decode's own pool: it holds what this group had cached.
                sent -= request.cached_tokens // self.pool.page_size
            request.sent_pages += sent
            if part.last:
                arrives = self._clock.now_seconds + self._costs.transfer_seconds(sent)
                self._clock.at(arrives, lambda request=request: self._concluded(request))
        self._step()

    def _concluded(self, request: SimulatedRequest) -> None:
        for rank in range(self._ranks):
            self.scheduler.concluded(request.room, rank)
        del self._open[request.room]
        self._hooks.prefilled(request)
        self._step()

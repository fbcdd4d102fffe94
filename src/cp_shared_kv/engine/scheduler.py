"""Which tokens of which requests run next. Owns all logical state of a prefill group; no I/O.

A request is admitted in the order in which decode reserved its pages, when all pages of its
prompt fit the logical pool: a running request never waits for pages, so nothing can deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from cp_shared_kv.engine.batch import Batch, BatchRequest
from cp_shared_kv.engine.batch_draft import BatchDraft
from cp_shared_kv.engine.request import PrefillRequest, Stage
from cp_shared_kv.errors import InvariantError, ProtocolError
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import OpenRoom

MOST_PASSED = 64
"""So many requests that wait for one batch may be passed by others: looking takes time."""


class PrefillScheduler:
    """Queue, admission and chunking of one prefill group.

    `group_ranks` conclude each room. `chunk_tokens` and `max_prefix_pages`, which is what the
    ranks' scratch holds, bound a batch as `BatchDraft` says.
    """

    def __init__(
        self,
        pool: LogicalPool,
        *,
        group_ranks: int,
        chunk_tokens: int,
        max_prefix_pages: int,
        epoch: int,
    ) -> None:
        self.pool = pool
        self.epoch = epoch
        self._ranks = set(range(group_ranks))
        self._chunk_tokens = chunk_tokens
        self._max_prefix_pages = max_prefix_pages
        self._requests: dict[int, PrefillRequest] = {}
        self._admission_queue: list[int] = []
        self._prefilling: list[int] = []
        self._in_flight: Batch | None = None
        self._next_batch_id = 0
        self.prompt_tokens_total = 0
        self.cached_tokens_total = 0

    # What comes in ---------------------------------------------------------------------------

    def submit(self, request: PrefillRequest) -> None:
        """Take a request that has just been offered to decode."""
        if request.room in self._requests:
            raise ProtocolError("room is already open", value=request.room)
        self._requests[request.room] = request

    def reserved(self, reservation: OpenRoom) -> None:
        """Decode set pages aside: the request may now be admitted, behind those before it."""
        request = self._requests.get(reservation.room)
        if request is None or request.stage is not Stage.OFFERED:
            return  # aborted meanwhile, or a repeat
        request.reservation = reservation
        request.next_position = reservation.first_position
        request.stage = Stage.RESERVED
        self._admission_queue.append(request.room)

    def batch_done(
        self, batch_id: int, without_token: AbstractSet[int] = frozenset()
    ) -> tuple[list[PrefillRequest], list[PrefillRequest]]:
        """Book the batch in flight as computed on every rank.

        `without_token` are the rooms whose last row held no numbers: a prompt that ends so leaves
        nothing more in the cache. Returns the prompts that it completed, and the requests that
        are gone with it because every rank had concluded them before.
        """
        batch = self._in_flight
        if batch is None or batch.batch_id != batch_id:
            raise InvariantError("a batch finished that is not in flight", value=batch_id)
        self._in_flight = None
        completed: list[PrefillRequest] = []
        gone: list[PrefillRequest] = []
        for part in batch.requests:
            request = self._requests[part.room]
            request.computed_tokens += part.new_tokens
            if part.last and part.room in without_token:
                request.without_numbers = True
            if request.failure is None:
                self._publish(request)  # prompts that come now need not wait for all of this one
                if not part.last:
                    continue
            self._prefilling.remove(part.room)
            request.stage = Stage.SENDING
            if request.failure is None:
                completed.append(request)
            if self._finish_if_quiet(request) is not None:
                gone.append(request)
        return completed, gone

    def concluded(self, room: int, rank: int) -> PrefillRequest | None:
        """A rank will touch the room's pages no more; returns the request once all N have."""
        request = self._requests.get(room)
        if request is None:
            return None
        request.concluded_ranks.add(rank)
        return self._finish_if_quiet(request)

    def abort(self, room: int, reason: str) -> PrefillRequest | None:
        """Stop a request wherever it is.

        Returns it if it is gone at once, because no rank has it open. Otherwise the caller tells
        the ranks, and it goes when all of them have concluded.
        """
        request = self._requests.get(room)
        if request is None:
            return None
        request.failure = request.failure or reason
        if request.stage in (Stage.OFFERED, Stage.RESERVED):
            if request.stage is Stage.RESERVED:
                self._admission_queue.remove(room)
            return self._requests.pop(room)
        in_flight = self._in_flight is not None and any(
            part.room == room for part in self._in_flight.requests
        )
        if request.stage is Stage.PREFILLING and not in_flight:
            self._prefilling.remove(room)
            request.stage = Stage.SENDING
        return self._finish_if_quiet(request)

    # What goes out ---------------------------------------------------------------------------

    def next_batch(self) -> tuple[Batch, list[PrefillRequest]] | None:
        """The next forward pass and the requests it admits, or None while there is none to run.

        One batch is in flight at a time. Running requests come first, then admissions. Nobody is
        admitted past one that waits for pages, and past one that waits for this batch, since others
        in it compute at least half of what it lacks, only who ends in this batch.
        """
        if self._in_flight is not None:
            return None
        draft = BatchDraft(self._chunk_tokens, self._max_prefix_pages)
        for room in self._prefilling:
            self._choose(self._requests[room], draft)
        admitted: list[PrefillRequest] = []
        waiting = 0
        for request in [self._requests[room] for room in self._admission_queue]:
            if not draft.has_room_after(self._prefilling) or waiting > MOST_PASSED:
                break
            cached_pages = self.pool.match(self._usable_keys(request))
            if self._is_worth_waiting(request, cached_pages, draft):
                request.has_waited = True
                waiting += 1
                continue
            if waiting and not self._ends_in(draft, request, cached_pages):
                break
            if not self._admit(request):
                break
            self._admission_queue.remove(request.room)
            self._prefilling.append(request.room)
            admitted.append(request)
            self._choose(request, draft)
        if not draft.chosen:
            return None
        batch = self._build(draft.chosen)
        self._in_flight = batch
        return batch, admitted

    # State ------------------------------------------------------------------------------------

    def get(self, room: int) -> PrefillRequest | None:
        """The request of a room, while it is open."""
        return self._requests.get(room)

    def requests(self) -> Iterator[PrefillRequest]:
        """All open requests."""
        return iter(list(self._requests.values()))

    @property
    def in_flight(self) -> Batch | None:
        """The batch that the ranks are computing."""
        return self._in_flight

    @property
    def queued(self) -> int:
        """Requests that hold no page yet."""
        return sum(r.stage in (Stage.OFFERED, Stage.RESERVED) for r in self._requests.values())

    @property
    def running(self) -> int:
        """Requests that hold pages."""
        return len(self._requests) - self.queued

    def check_invariants(self) -> None:
        """Raise `InvariantError` if the queue, the stages and the pool disagree."""
        self.pool.check_invariants()
        holding = {
            r.room for r in self._requests.values() if r.stage in (Stage.PREFILLING, Stage.SENDING)
        }
        if set(self.pool.rooms) != holding:
            raise InvariantError(
                "rooms that hold pages are not the running ones",
                value=sorted(set(self.pool.rooms) ^ holding),
            )
        computing = [r.room for r in self._requests.values() if r.stage is Stage.PREFILLING]
        if sorted(self._prefilling) != sorted(computing):
            raise InvariantError("the rooms that batches are made of are not the computing ones")
        queue = {r.room for r in self._requests.values() if r.stage is Stage.RESERVED}
        if set(self._admission_queue) != queue or len(self._admission_queue) != len(queue):
            raise InvariantError("the admission queue is not the reserved requests")

    # Steps ------------------------------------------------------------------------------------

    def _is_worth_waiting(
        self, request: PrefillRequest, cached_pages: int, draft: BatchDraft
    ) -> bool:
        """Whether others in a batch compute at least half of what a request lacks: one batch later
        it finds that in the cache. Nobody waits twice: what failed or was evicted is not there."""
        if request.has_waited or not self.pool.prefix_caching:
            return False
        page_size = self.pool.page_size
        lacking = request.prompt_tokens - cached_pages * page_size
        needed_pages = cached_pages + -(-lacking // (2 * page_size))
        usable = self._usable_keys(request)
        return needed_pages <= len(usable) and draft.computes(usable[:needed_pages], page_size)

    def _ends_in(self, draft: BatchDraft, request: PrefillRequest, cached_pages: int) -> bool:
        """Whether a batch computes the whole request: it then holds up nobody in the next one."""
        lacking = request.prompt_tokens - cached_pages * self.pool.page_size
        return draft.holds_whole(lacking, cached_pages)

    def _usable_keys(self, request: PrefillRequest) -> npt.NDArray[np.void]:
        # A full hit still computes the last token: its logits choose the first output token.
        return request.page_keys[: (request.prompt_tokens - 1) // self.pool.page_size]

    def _admit(self, request: PrefillRequest) -> bool:
        page_size = self.pool.page_size
        usable = self._usable_keys(request)
        admission = self.pool.admit(request.room, usable, -(-request.prompt_tokens // page_size))
        if admission is None:
            return False
        request.logical_pages = admission.logical_pages
        request.cached_tokens = admission.cached_pages * page_size
        request.computed_tokens = request.cached_tokens
        request.stage = Stage.PREFILLING
        self.prompt_tokens_total += request.prompt_tokens
        self.cached_tokens_total += request.cached_tokens
        return True

    def _choose(self, request: PrefillRequest, draft: BatchDraft) -> None:
        assert request.logical_pages is not None
        prefix_pages = -(-request.computed_tokens // self.pool.page_size)
        draft.add_what_fits(request, request.logical_pages[:prefix_pages])

    def _build(self, chosen: list[tuple[PrefillRequest, int]]) -> Batch:
        page_size = self.pool.page_size
        parts: list[BatchRequest] = []
        tokens: list[npt.NDArray[np.int64]] = []
        for request, take in chosen:
            assert request.logical_pages is not None
            start = request.computed_tokens
            stop = start + take
            last = stop == request.prompt_tokens
            # A page that this chunk only half fills goes with the chunk that completes it.
            complete = -(-stop // page_size) if last else stop // page_size
            send_stop = max(complete, request.next_position)
            parts.append(
                BatchRequest(
                    room=request.room,
                    prefix_tokens=start,
                    new_tokens=take,
                    logical_pages=pack_int64(request.logical_pages[: -(-stop // page_size)]),
                    chunk=request.next_chunk,
                    send_start=request.next_position,
                    send_stop=send_stop,
                    last=last,
                )
            )
            request.next_position = send_stop
            request.next_chunk += 1
            tokens.append(request.token_ids[start:stop])
        self._next_batch_id += 1
        return Batch(
            epoch=self.epoch,
            batch_id=self._next_batch_id,
            token_ids=pack_int64(np.concatenate(tokens)),
            requests=parts,
        )

    def _publish(self, request: PrefillRequest) -> None:
        if request.without_numbers:
            return  # what was wrong once would be so for every prompt that begins like this one
        full_pages = request.computed_tokens // self.pool.page_size
        self.pool.publish(request.room, request.page_keys[:full_pages])

    def _finish_if_quiet(self, request: PrefillRequest) -> PrefillRequest | None:
        if request.stage is not Stage.SENDING or request.concluded_ranks != self._ranks:
            return None
        self._publish(request)  # stopped early: what was computed still serves the next prompt
        self.pool.release(request.room)
        return self._requests.pop(request.room)

"""Decode's pool in simulated time: which pages it sets aside, and what sending to them costs.

Two pools are given the same requests. In one each owner's pages get neighbouring destinations
(as the engine does); in the other position i gets the i-th page drawn. Both
hold the same keys at any time, since neither matching nor eviction looks at page numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cp_shared_kv.engine.batch import BatchRequest
from cp_shared_kv.engine.decode_reservation import arrange_for_senders
from cp_shared_kv.errors import InvariantError
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.planner.simulated_request import SimulatedRequest
from cp_shared_kv.transfer.descriptors import merge_pages


@dataclass(frozen=True, slots=True)
class _Waiting:
    request: SimulatedRequest
    reserved: Callable[[int], None]


class DecodeSide:
    """The decode worker of one group. `prefill` is the pool that sends."""

    def __init__(self, decode_tokens: int, prefill: KVCapacity) -> None:
        capacity = KVCapacity.from_tokens(decode_tokens, prefill.page_size, 1)
        self._striped, self._plain = LogicalPool(capacity), LogicalPool(capacity)
        self._page_size, self._owners = prefill.page_size, prefill.cp_size
        self._owner_stride = prefill.physical_pages + 2
        self._layout = CpSharedKVLayout(
            prefill.page_size, prefill.cp_size, 0, physical_pages=prefill.physical_pages
        )
        self._waiting: deque[_Waiting] = deque()

    @property
    def tokens(self) -> int:
        """The most tokens, answer included, that a request may have."""
        return self._striped.total_pages * self._page_size

    def offer(self, request: SimulatedRequest, reserved: Callable[[int], None]) -> None:
        """Set pages aside for prompt and answer, behind those that wait for it already.

        `reserved` is told how many leading pages decode holds, now or when there is room.
        """
        self._waiting.append(_Waiting(request, reserved))
        self._reserve()

    def sent(self, request: SimulatedRequest, part: BatchRequest) -> None:
        """Count the descriptors of a chunk, of all ranks, for one layer and kind of page."""
        positions = slice(part.send_start, part.send_stop)
        source = LogicalPages(part.pages()[positions])
        if not len(source):
            return
        # Each owner's pages in a range of their own, so that one merge serves all ranks.
        owner = self._layout.owner_for_logical_pages(source)
        own = self._layout.logical_pages_to_physical(source)
        physical = PhysicalPages(own + owner * self._owner_stride)
        plain = self._plain.pages(request.room)[positions]
        striped = self._striped.pages(request.room)[positions]
        request.descriptors_plain += merge_pages(physical, PhysicalPages(plain)).count
        request.descriptors_striped += merge_pages(physical, PhysicalPages(striped)).count

    def finish(self, request: SimulatedRequest) -> None:
        """The answer is complete: its prompt stays cached, and others may have the room."""
        for pool in (self._striped, self._plain):
            pool.publish(request.room, request.page_keys)
            pool.release(request.room)
        self._reserve()

    def check_invariants(self) -> None:
        """InvariantError if a pool's books do not balance, or one holds what the other lacks."""
        for pool in (self._striped, self._plain):
            pool.check_invariants()
        if self._striped.cached_pages != self._plain.cached_pages:
            raise InvariantError("the two decode pools have drifted apart")

    def _reserve(self) -> None:
        while self._waiting:
            request = self._waiting[0].request
            tokens = request.prompt_tokens + max(1, request.output_tokens)
            pages = -(-tokens // self._page_size)
            prompt_pages = -(-request.prompt_tokens // self._page_size)
            arrange = partial(arrange_for_senders, self._owners, prompt_pages)
            admission = self._striped.admit(request.room, request.page_keys, pages, arrange=arrange)
            if admission is None:
                return
            self._plain.admit(request.room, request.page_keys, pages)
            self._waiting.popleft().reserved(admission.cached_pages)

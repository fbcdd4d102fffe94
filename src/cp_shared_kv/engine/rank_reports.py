"""What the ranks of a prefill group may say of batches and rooms, and when all N have said it."""

from __future__ import annotations

from cp_shared_kv.engine.messages import BatchDone, RoomConcluded
from cp_shared_kv.engine.request import PrefillRequest, Stage
from cp_shared_kv.engine.scheduler import PrefillScheduler
from cp_shared_kv.errors import ProtocolError


class RankReports:
    """Counts by the books of `scheduler`, which it does not change. What is out of turn is refused
    with a ProtocolError: pages go by these words."""

    def __init__(self, scheduler: PrefillScheduler, cp_size: int) -> None:
        self._scheduler = scheduler
        self._cp_size = cp_size
        self._done: dict[int, BatchDone] = {}

    def check_rank(self, rank: int) -> None:
        """ProtocolError unless there is such a rank."""
        if not 0 <= rank < self._cp_size:
            raise ProtocolError(
                "message of a rank that does not exist",
                value=rank,
                allowed=f"0 to {self._cp_size - 1}",
            )

    def batch_done(self, message: BatchDone) -> list[BatchDone]:
        """One rank has run the batch in flight; what each has said, once all have."""
        running = self._scheduler.in_flight
        if running is None or running.batch_id != message.batch_id:
            raise ProtocolError("a batch is done that is not in flight", value=message.batch_id)
        if message.rank in self._done:
            raise ProtocolError("a rank has done a batch twice", value=message.rank)
        self._done[message.rank] = message
        if len(self._done) < self._cp_size:
            return []
        told = list(self._done.values())
        self._done.clear()
        return told

    def room_concluded(self, message: RoomConcluded) -> PrefillRequest:
        """A rank is through with a room: its request."""
        request = self._scheduler.get(message.room)
        # A conclusion lets the room's pages go: one out of turn is not believed.
        if request is None or request.stage in (Stage.OFFERED, Stage.RESERVED):
            raise ProtocolError("a rank concluded a room that it has not open", value=message.room)
        if message.rank in request.concluded_ranks:
            raise ProtocolError("a rank concluded a room twice", value=message.room)
        failed = message.failure is not None or request.failure is not None
        if not failed and not self._is_all_computed(request):
            raise ProtocolError("a rank concluded a room with chunks to come", value=message.room)
        return request

    def _is_all_computed(self, request: PrefillRequest) -> bool:
        """Whether the prompt's last chunk is computed, or being computed: others may be faster."""
        running = self._scheduler.in_flight
        return request.stage is Stage.SENDING or (
            running is not None
            and any(part.room == request.room and part.last for part in running.requests)
        )

"""What a prefill group's ranks have sent, counted and logged as the controller hears of it."""

from __future__ import annotations

import logging

from cp_shared_kv.engine.messages import BatchDone, PrefillStats, RoomConcluded
from cp_shared_kv.engine.scheduler import PrefillScheduler

logger = logging.getLogger("cp_shared_kv")


class GroupFigures:
    """Sums over one life of a group, by rank."""

    def __init__(self, cp_size: int) -> None:
        self._cp_size = cp_size
        self._transfers: dict[int, dict[int, RoomConcluded]] = {}
        self._sent_pages = [0] * cp_size
        self._sent_descriptors = [0] * cp_size
        self._sent_bytes = [0] * cp_size
        self._scratch_bytes = [0] * cp_size
        self._read_bytes = [0] * cp_size

    def computed(self, message: BatchDone) -> None:
        """A rank has run a batch."""
        self._scratch_bytes[message.rank] = message.scratch_bytes
        self._read_bytes[message.rank] = message.read_bytes_total

    def concluded(self, message: RoomConcluded) -> None:
        """A rank is through with a room; the last one's report is logged with all others."""
        self._sent_pages[message.rank] += message.pages
        self._sent_descriptors[message.rank] += message.descriptors
        self._sent_bytes[message.rank] += message.bytes
        reports = self._transfers.setdefault(message.room, {})
        reports[message.rank] = message
        if len(reports) == self._cp_size:
            _log_transfer(self._transfers.pop(message.room))

    def stats(self, ticket: int, scheduler: PrefillScheduler) -> PrefillStats:
        """The group's figures at this moment."""
        pool, page = scheduler.pool, scheduler.pool.page_size
        return PrefillStats(
            ticket=ticket,
            available_tokens=pool.available_pages * page,
            cached_tokens=pool.cached_pages * page,
            locked_tokens=pool.locked_pages * page,
            free_pages_per_owner=pool.free_pages_per_owner().tolist(),
            queued=scheduler.queued,
            running=scheduler.running,
            prompt_tokens_total=scheduler.prompt_tokens_total,
            cached_tokens_total=scheduler.cached_tokens_total,
            evicted_pages_total=pool.evicted_pages_total,
            sent_pages_total=list(self._sent_pages),
            sent_descriptors_total=list(self._sent_descriptors),
            sent_bytes_total=list(self._sent_bytes),
            read_bytes_total=list(self._read_bytes),
            scratch_bytes=list(self._scratch_bytes),
        )


def _log_transfer(reports: dict[int, RoomConcluded]) -> None:
    for rank in sorted(reports):
        told = reports[rank]
        if told.failure is not None:
            logger.info("CP shared KV transfer: rank=%d failed: %s", rank, told.failure)
            continue
        logger.info(
            "CP shared KV transfer: rank=%d sent pages=%d descriptors=%d bytes=%d",
            rank,
            told.pages,
            told.descriptors,
            told.bytes,
        )

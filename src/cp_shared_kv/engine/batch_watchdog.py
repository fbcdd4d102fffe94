"""Notices a batch that does not end: a rank is stopped, or their collective hangs. No I/O."""

from __future__ import annotations

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.child import ALIVE_SECONDS
from cp_shared_kv.engine.waking_time import WakingTime
from cp_shared_kv.errors import CpkvError


class BatchWatchdog:
    """Of a prefill controller, whose own pauses do not count against its ranks."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._waking = WakingTime(ALIVE_SECONDS)
        self._batch: Batch | None = None
        self._since_seconds = 0.0

    def look(self, batch: Batch | None, now_seconds: float) -> None:
        """CpkvError when the batch in flight has been the same for too long.

        To call at each turn, which lasts ALIVE_SECONDS at most, with the time before the messages
        of ranks were read.
        """
        awake_seconds = self._waking.at(now_seconds)
        lasts_seconds = awake_seconds - self._since_seconds
        if batch is not self._batch:
            self._batch, self._since_seconds = batch, awake_seconds
        elif batch is not None and lasts_seconds > self._timeout_seconds:
            raise CpkvError(
                f"batch {batch.batch_id} has not ended on all ranks",
                value=f"{lasts_seconds:.0f} s",
                allowed=f"--watchdog-timeout {self._timeout_seconds:.0f}",
            )

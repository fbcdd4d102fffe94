"""One write on its way through Mooncake: ranges that have been checked, and who is told of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.errors import TransferError

PIECE_BYTES = 4 << 20
"""Longer ranges go in pieces: each is progress, and the engine sends several at a time."""

Int64 = npt.NDArray[np.int64]
_NOWHERE: Int64 = np.empty(0, dtype=np.int64)


class MooncakeWrite:
    """Ranges of the region `memory`, u8[bytes], to remote addresses: int64[count] each, checked,
    none empty.

    `released` is called once, as soon as no byte of it is read or can land any more. The future
    is done after that, or before it if the write was given up. A write of no ranges only finds
    out whether the peer is there. `given_up` and `submitted` change under the lane's lock.
    """

    def __init__(
        self,
        memory: torch.Tensor | None = None,
        local_offset_bytes: Int64 = _NOWHERE,
        remote_address: Int64 = _NOWHERE,
        nbytes: Int64 = _NOWHERE,
        released: Callable[[], None] | None = None,
    ) -> None:
        self.future: Future[int] = Future()
        self.given_up = False
        """The future has its answer, or is about to; submit nothing more."""
        self.submitted = False
        """Some of it may have been sent."""
        self._memory = memory  # held, so that it outlives the write
        self._local_address = local_offset_bytes + (0 if memory is None else memory.data_ptr())
        self._written = None if memory is None else _mark(memory)
        self._remote_address = remote_address
        self._nbytes = nbytes
        self._released = released
        self._held = threading.Lock()  # taken once, by whoever releases first

    def await_source(self) -> None:
        """Wait until the GPU has done what was queued before this write was made, if it is a GPU's.

        RuntimeError after a fault of the GPU, which no later call survives.
        """
        if self._written is not None:
            self._written.synchronize()

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(local address, remote address, bytes), at most PIECE_BYTES each."""
        columns = (self._local_address, self._remote_address, self._nbytes)
        for local, remote, nbytes in zip(*(c.tolist() for c in columns), strict=True):
            for start in range(0, nbytes, PIECE_BYTES):
                yield local + start, remote + start, min(PIECE_BYTES, nbytes - start)

    def release(self) -> None:
        """No byte of it is read or can land any more. Again: no effect."""
        if self._held.acquire(blocking=False):
            self._memory = None
            if self._released is not None:
                self._released()

    def answer(self, error: TransferError | None) -> None:
        """Give the future its outcome; it must be running."""
        if error is None:
            self.future.set_result(int(self._nbytes.sum()))
        else:
            self.future.set_exception(error)

    def refuse(self, error: TransferError) -> None:
        """End a write that was never begun."""
        self.release()
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


def _mark(memory: torch.Tensor) -> torch.cuda.Event | None:
    """The end of all that is queued on the current stream of a GPU's memory."""
    if not memory.is_cuda:
        return None
    queued = torch.cuda.Event(blocking=True)
    queued.record(torch.cuda.current_stream(memory.device))
    return queued

"""The way to one Mooncake peer: an engine, a thread, and one write after the other.

A peer has an engine of its own because an engine is locked as a whole while it waits for one
peer's first answer. The thread sleeps between looks at what is under way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from cp_shared_kv.errors import TransferError
from cp_shared_kv.transfer.mooncake import MooncakeEngine, Transfer
from cp_shared_kv.transfer.mooncake_session import LIFE_BYTES, MooncakePeer, proof_of_life
from cp_shared_kv.transfer.mooncake_settings import MAX_IN_FLIGHT
from cp_shared_kv.transfer.mooncake_write import MooncakeWrite

_LOOKS, _LOOKS_ELSEWHERE = 2, 5
_SHORTEST_NAP_SECONDS, _LONGEST_NAP_SECONDS = 50e-6, 2e-3


class MooncakeLane:
    """Writes to one peer, in the order in which they are put. Safe to call from several threads.

    `retire` gets the engine back when the lane has closed and nothing is under way. `device` is the
    GPU that writes are read from, if they are.
    """

    def __init__(
        self,
        peer: MooncakePeer,
        engine: MooncakeEngine,
        stall_seconds: float,
        retire: Callable[[MooncakeEngine], None],
        device: torch.device | None = None,
    ) -> None:
        self.peer = peer
        self._device = device
        self._engine = engine
        self._stall_seconds = stall_seconds
        self._retire = retire
        self._changed = threading.Condition()
        self._waiting: deque[MooncakeWrite] = deque()
        self._current: MooncakeWrite | None = None
        self._progress_at = 0.0
        self._lost: TransferError | None = self._error("peer has not answered yet", "unreachable")
        """Why the peer cannot be written to."""
        self._doubt: TransferError | None = None
        """A write of which nobody can tell any more whether it can land."""
        self._closing = False
        # Pinned, since a GPU copies into it.
        pinned = device is not None
        self._life = torch.zeros(LIFE_BYTES, dtype=torch.uint8, pin_memory=pinned).numpy()
        self._expected_life = proof_of_life(peer.info.session_id)
        threading.Thread(target=self._run, name=f"mooncake {peer.endpoint}", daemon=True).start()

    @property
    def closing(self) -> bool:
        """`begin_close` was called."""
        return self._closing

    def put(self, write: MooncakeWrite) -> None:
        """Send it after those before it. TransferError, and nothing done, if it cannot be."""
        with self._changed:
            self._check_open()
            if self._lost is not None:
                what = f"write to a peer that is unreachable: {self._lost.what}"
                raise self._error(what, "unreachable")
            self._enqueue(write)

    def find(self, limit_seconds: float) -> None:
        """Look for a peer that is lost, until it is found in the same life and all is quiet.

        TransferError if it is not in time; it goes on being looked for, for the next call.
        """
        with self._changed:
            self._check_open()
            if self._doubt is not None:
                raise self._doubt
            if self._lost is not None and self._is_idle():
                self._enqueue(MooncakeWrite())
            self._changed.wait_for(lambda: self._lost is None or self._is_idle(), limit_seconds)
            if self._lost is not None:
                raise self._lost

    def check_stall(self) -> None:
        """Give up the write that has not moved for `stall_seconds`, and those behind it."""
        with self._changed:
            write, idle_seconds = self._current, time.monotonic() - self._progress_at
            if write is None or idle_seconds < self._stall_seconds:
                return
            what = f"nothing has landed at the peer for {idle_seconds:.0f} s"
            if write.submitted:
                error = self._error(what, "stalled", quiescent=False)
            else:
                error = self._error("peer does not answer: " + what, "unreachable")
        self._give_up(write, error)

    def begin_close(self) -> None:
        """Take no more writes, and submit no more of the one under way."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            current = self._current
        error = self._error("peer was disconnected before the write was sent", "closed")
        if current is not None and not current.submitted:
            self._give_up(current, error)
        self._refuse_waiting(error)

    def closed(self, limit_seconds: float) -> bool:
        """Wait for what is under way. True: no write of this lane can land any more."""

        def quiet() -> bool:
            return self._current is None or not self._current.submitted

        with self._changed:
            return self._changed.wait_for(quiet, limit_seconds)

    # The thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # of this thread: else the engine takes GPU 0
        while (write := self._next()) is not None:
            error = self._carry_out(write)
            write.release()
            with self._changed:
                doubtful = error is not None and self.peer.elsewhere and write.submitted
                if error is not None and doubtful:
                    error = self._doubt = self._error(error.what, error.kind, quiescent=False)
                lost = error is not None and (doubtful or error.kind == "unreachable")
                self._current = None
                given_up = write.given_up
                if lost or (error is None and not given_up):
                    self._lost = error
                self._changed.notify_all()
            if not given_up:
                write.answer(error)
            if error is not None and lost:
                self._refuse_waiting(error)
        self._retire(self._engine)

    def _next(self) -> MooncakeWrite | None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return None
                write = self._waiting.popleft()
                if write.future.set_running_or_notify_cancel():
                    self._progress_at = time.monotonic()
                    self._current = write
                    return write
                write.release()

    def _carry_out(self, write: MooncakeWrite) -> TransferError | None:
        """Returns when nothing of the write is under way any more."""
        # The first answer after another process has taken the endpoint, or after a connection was
        # lost, can be an error; it makes the engine ask again for where the peer is. A network may
        # have cut every connection that the engine keeps.
        looks = _LOOKS_ELSEWHERE if self.peer.elsewhere else _LOOKS
        if not any(self._is_alive() for _ in range(looks)):
            return self._error("peer does not answer, or is not the one connected", "unreachable")
        try:
            write.await_source()
        except RuntimeError as error:
            return self._error(f"the GPU that is read from has failed: {error}", "unreachable")
        if self._send(write):
            return None
        if self._closing:
            return self._error("peer was disconnected during the write", "closed")
        if self._is_alive():
            return self._error("peer refused a range, or broke a connection", "refused")
        return self._error("peer has gone during the write", "unreachable")

    def _is_alive(self) -> bool:
        self._life[:] = 0
        transfer = self._engine.read(
            self.peer.endpoint, self._life.ctypes.data, self.peer.life.address, LIFE_BYTES
        )
        if transfer is None or not self._wait(transfer):
            return False
        return np.array_equal(self._life, self._expected_life)

    def _send(self, write: MooncakeWrite) -> bool:
        """True: all of it has landed. Whatever it was, nothing is under way on return."""
        under_way: deque[Transfer] = deque()
        landed = True
        for piece in write.pieces():
            if len(under_way) == MAX_IN_FLIGHT:
                landed = self._wait(under_way.popleft())
            transfer = None
            if landed and self._may_submit(write):
                transfer = self._engine.write(self.peer.endpoint, *piece)
            if transfer is None:
                landed = False
                break
            under_way.append(transfer)
        for transfer in under_way:
            landed = self._wait(transfer) and landed
        return landed

    def _may_submit(self, write: MooncakeWrite) -> bool:
        with self._changed:
            may = not (write.given_up or self._closing)
            write.submitted = write.submitted or may
            return may

    def _wait(self, transfer: Transfer) -> bool:
        nap_seconds = _SHORTEST_NAP_SECONDS
        while (landed := transfer.landed()) is None:
            time.sleep(nap_seconds)
            nap_seconds = min(2 * nap_seconds, _LONGEST_NAP_SECONDS)
        self._progress_at = time.monotonic()
        return landed

    # Any thread ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closing:
            raise self._error("peer is being disconnected", "unknown_peer")

    def _is_idle(self) -> bool:
        return self._current is None and not self._waiting

    def _enqueue(self, write: MooncakeWrite) -> None:
        self._waiting.append(write)
        self._changed.notify_all()

    def _give_up(self, write: MooncakeWrite, error: TransferError) -> None:
        """Answer for a write whose end is not known, unless it has ended or was given up."""
        with self._changed:
            if write is not self._current or write.given_up:
                return
            write.given_up = True
            self._lost = error
            self._changed.notify_all()
            idle = not write.submitted
        if idle:
            write.release()
        write.answer(error)
        self._refuse_waiting(error)

    def _refuse_waiting(self, cause: TransferError) -> None:
        """None of those behind a write that ended so, or that a disconnect found, was begun."""
        kind = "closed" if cause.kind == "closed" else "unreachable"
        error = self._error(f"not sent: {cause.what}", kind)
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
        for write in waiting:
            write.refuse(error)

    def _error(self, what: str, kind: str, *, quiescent: bool = True) -> TransferError:
        return TransferError(what, kind=kind, peer=self.peer.info.session_id, quiescent=quiescent)

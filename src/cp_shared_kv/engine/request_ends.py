"""How a request ends at prefill before it is answered: who of server, ranks and decode is told."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cp_shared_kv.engine.messages import DisconnectDecode, RoomRefused
from cp_shared_kv.engine.pairing import DecodePeer
from cp_shared_kv.engine.request import PrefillRequest
from cp_shared_kv.engine.scheduler import PrefillScheduler
from cp_shared_kv.transfer.messages import AbortRoom, Withdrawn, as_reason

Send = Callable[[msgspec.Struct], None]


class RequestEnds:
    """Stops requests of `scheduler`."""

    def __init__(self, scheduler: PrefillScheduler, *, to_server: Send, to_ranks: Send) -> None:
        self._scheduler = scheduler
        self._to_server, self._to_ranks = to_server, to_ranks

    def abort(self, room: int, reason: str) -> None:
        """Stop a room wherever it is: at the ranks, at decode, or in the queue."""
        request = self._scheduler.get(room)
        if request is None:
            return
        reason = as_reason(reason)
        decode = request.decode
        if self._scheduler.abort(room, reason) is not None:
            self.withdraw(decode, room, reason)
            self._refuse(room, reason)
            return
        stop = AbortRoom(
            epoch=self._scheduler.epoch, peer_epoch=decode.epoch, room=room, reason=reason
        )
        self._to_ranks(stop)
        decode.send(stop)

    def abort_all(self, reason: str) -> None:
        """Stop every room."""
        for request in self._scheduler.requests():
            self.abort(request.room, reason)

    def withdraw(self, decode: DecodePeer, room: int, reason: str) -> None:
        """Tell decode that no rank has the room open or will open it."""
        decode.send(
            Withdrawn(
                epoch=self._scheduler.epoch, peer_epoch=decode.epoch, room=room, reason=reason
            )
        )

    def decode_lost(self, decode: DecodePeer, reason: str) -> None:
        """Stop the rooms of a decode worker that is gone. The server sends those elsewhere of which
        it has had no token yet."""
        reason = as_reason(reason)
        for request in self._scheduler.requests():
            if request.decode is not decode:
                continue
            self._scheduler.abort(request.room, reason)
            if not request.answered:
                request.answered = True  # maybe long before the ranks have concluded
                self._to_server(RoomRefused(room=request.room, kind="unavailable", reason=reason))
        # Their rooms conclude at the ranks, which frees the pages here.
        self._to_ranks(DisconnectDecode(decode_epoch=decode.epoch, reason=reason))

    def gone(self, request: PrefillRequest) -> None:
        """Every rank is through with it: if it was stopped, the server may not know yet."""
        if request.failure is not None and not request.answered:
            self._refuse(request.room, request.failure)

    def _refuse(self, room: int, reason: str) -> None:
        self._to_server(RoomRefused(room=room, kind="failed", reason=reason))

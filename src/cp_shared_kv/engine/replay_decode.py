"""Decode's side of a replay: pages arrive by the real transfer, steps are run as recorded."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.messages import ReplayReady, RoomCovered, StepDone
from cp_shared_kv.engine.model_runner import ModelRunner
from cp_shared_kv.errors import CpkvError, ProtocolError
from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.transfer.actions import Covered, RoomFailed, SendMessage
from cp_shared_kv.transfer.codec import unpack_int64
from cp_shared_kv.transfer.decode_session import DecodeSession
from cp_shared_kv.transfer.messages import Acknowledged, Concluded, Quiesced, Reserve, Sent
from cp_shared_kv.transfer.reservation import Reservation

POISON = 0xFF
"""Every byte of the pool before a replay: NaN in every format, so a page that never came shows."""


class ReplayDecode:
    """Stands in for the decode engine: decides nothing, runs what the replay tool sends."""

    def __init__(
        self,
        pool: KVPool,
        runner: ModelRunner,
        *,
        epoch: int,
        prefill_epoch: int,
        cp_size: int,
        to_controller: Callable[[msgspec.Struct], None],
        to_rank: Callable[[int, msgspec.Struct], None],
    ) -> None:
        self._runner = runner
        self._epoch, self._prefill_epoch, self._cp_size = epoch, prefill_epoch, cp_size
        self._to_controller, self._to_rank = to_controller, to_rank
        self._sessions: dict[int, DecodeSession] = {}
        pool.buffer.tensor.fill_(POISON)
        if pool.buffer.tensor.is_cuda:  # pages come from other processes, in no order with this
            torch.cuda.synchronize(pool.buffer.tensor.device)
        self._to_controller(ReplayReady())

    def handle(self, message: msgspec.Struct) -> None:
        """A reservation to expect, a rank's report, or a step to run."""
        match message:
            case Reserve():
                self._sessions[message.room] = DecodeSession(
                    room=message.room,
                    epoch=self._epoch,
                    peer_epoch=self._prefill_epoch,
                    cp_size=self._cp_size,
                    reservation=Reservation(
                        message.first_position,
                        PhysicalPages(unpack_int64(message.physical_pages)),
                    ),
                )
            case Sent() | Concluded() | Quiesced():
                self._on_transfer(message)
            case Batch():
                self._runner.execute(message)
                self._to_controller(StepDone(batch_id=message.batch_id))
            case _:
                raise ProtocolError("not part of a replay", value=type(message).__name__)

    def _on_transfer(self, message: Sent | Concluded | Quiesced) -> None:
        session = self._sessions.get(message.room)
        if session is None:
            raise ProtocolError("pages for a room that was not replayed", value=message.room)
        for action in session.receive(message):
            match action:
                case SendMessage():
                    if isinstance(action.message, Acknowledged):
                        self._to_rank(action.message.rank, action.message)
                case Covered():
                    self._to_controller(RoomCovered(room=message.room))
                case RoomFailed():
                    raise CpkvError(f"replayed room failed: {action.reason}", value=message.room)
                case _:
                    pass

"""A room at the rank that sends it, and what its session tells the rank to do."""

from __future__ import annotations

from typing import Any

import numpy as np

from cp_shared_kv.layout.pages import PhysicalPages, Positions
from cp_shared_kv.transfer.actions import PrefillAction, ReleaseSources, SendMessage, SubmitWrite
from cp_shared_kv.transfer.messages import Acknowledged
from cp_shared_kv.transfer.prefill_session import PrefillSession
from cp_shared_kv.transfer.reservation import Reservation

ROOM, RANK, EPOCH, DECODE_EPOCH = 7, 2, 100, 200
LINK = {"epoch": DECODE_EPOCH, "peer_epoch": EPOCH, "room": ROOM}


def pages(*ids: int) -> PhysicalPages:
    return PhysicalPages(np.array(ids, dtype=np.int64))


def at(*positions: int) -> Positions:
    return Positions(np.array(positions, dtype=np.int64))


def session(first_position: int = 0, size: int = 4) -> PrefillSession:
    """Position first_position + i lands on decode's page 50 + i."""
    destinations = PhysicalPages(np.arange(50, 50 + size, dtype=np.int64))
    return PrefillSession(
        room=ROOM,
        rank=RANK,
        epoch=EPOCH,
        peer_epoch=DECODE_EPOCH,
        reservation=Reservation(first_position, destinations),
    )


def told(actions: list[PrefillAction]) -> list[Any]:
    return [action.message for action in actions if isinstance(action, SendMessage)]


def writes(actions: list[PrefillAction]) -> list[tuple[int, list[int], list[int]]]:
    return [
        (
            action.chunk,
            action.source_physical_pages.tolist(),
            action.destination_physical_pages.tolist(),
        )
        for action in actions
        if isinstance(action, SubmitWrite)
    ]


def released(actions: list[PrefillAction]) -> bool:
    return ReleaseSources(ROOM) in actions


def acknowledged(of: Any, **changes: int) -> Acknowledged:
    return Acknowledged(**({**LINK, "rank": RANK, **changes}), of=of)

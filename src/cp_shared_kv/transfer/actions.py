"""What a session asks its surroundings to do. A session itself does no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Acknowledged,
    Concluded,
    Quiesced,
    Released,
    Sent,
)


@dataclass(frozen=True, eq=False)
class SubmitWrite:
    """Copy this rank's page `source[i]` onto decode's page `destination[i]`: all layers and kinds.

    int64[pages] each, never empty. Answer once, with `write_done` or `write_failed` of the chunk.
    """

    chunk: int
    source_physical_pages: PhysicalPages
    destination_physical_pages: PhysicalPages


@dataclass(frozen=True)
class SendMessage:
    """Put a message on the link to the peer.

    From a rank all go to decode. From decode, Acknowledged goes to the rank that it names,
    AbortRoom and Released to the prefill controller.
    """

    message: Sent | Concluded | Quiesced | Acknowledged | AbortRoom | Released


@dataclass(frozen=True)
class ReleaseSources:
    """No write of this rank reads the room's source pages any more. Once a session."""

    room: int


@dataclass(frozen=True)
class Covered:
    """Every page of the reservation has landed, each once: decoding may start."""

    room: int


@dataclass(frozen=True)
class RoomFailed:
    """The room will not be covered. Its destination pages are not free yet: FreePages follows."""

    room: int
    reason: str


@dataclass(frozen=True)
class FreePages:
    """No write can reach the failed room's destination pages any more. Once a session."""

    room: int


PrefillAction = SubmitWrite | SendMessage | ReleaseSources
DecodeAction = SendMessage | Covered | RoomFailed | FreePages

r"""One room at one CP rank: which pages to write, what to tell decode, when the sources are free.

Events are method calls and return the actions to take, in order. No I/O, no clock, no threads.

    OPEN --last chunk--> FLUSHING --all writes done--> SUCCEEDED
      \----------------------\--any failure--> DRAINING --no write left--> FAILED
                                              (or FAILED at once)
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import InvariantError, LayoutError, ProtocolError
from cp_shared_kv.layout.checks import as_int64
from cp_shared_kv.layout.coverage import ExactCover
from cp_shared_kv.layout.pages import PhysicalPages, Positions
from cp_shared_kv.transfer.actions import (
    PrefillAction,
    ReleaseSources,
    SendMessage,
    SubmitWrite,
)
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Acknowledged,
    Concluded,
    Message,
    Quiesced,
    Sent,
    as_reason,
)
from cp_shared_kv.transfer.reservation import Reservation


class PrefillState(Enum):
    """Where a room stands at one rank."""

    OPEN = "open"
    """Takes chunks."""
    FLUSHING = "flushing"
    """Has the last chunk; some write has not ended."""
    SUCCEEDED = "succeeded"
    """Every write landed and the conclusion is on its way."""
    DRAINING = "draining"
    """Failed, concluded as not quiescent: some write may still land."""
    FAILED = "failed"
    """Failed, and no write can land any more."""


class PrefillSession:
    """The sending side of a room at one rank.

    `epoch` is this rank's life and `peer_epoch` decode's; messages of any other are refused.
    Made with an empty reservation and aborted, it concludes a room that this rank never opened.
    The engine opens each room at all ranks before it stops it, and has no need of that.

    Positions that decode holds already (below `reservation.first_position`) are dropped; one
    past the end, or in two chunks, fails the room before anything is submitted.
    """

    def __init__(
        self, room: int, rank: int, epoch: int, peer_epoch: int, reservation: Reservation
    ) -> None:
        self.room = room
        self.rank = rank
        self.epoch = epoch
        self.peer_epoch = peer_epoch
        self.reservation = reservation
        self.state = PrefillState.OPEN
        self.failure: str | None = None
        self._cover = ExactCover(reservation.size)
        self._chunks: dict[int, tuple[bytes, bytes, bool]] = {}
        self._unsettled: dict[int, Positions] = {}  # writes that may still read or land
        self._strays: set[int] = set()  # those of them that ended without proof of quiescence
        self._settled: set[int] = set()
        self._sent: list[Sent] = []
        self._unacknowledged: dict[str, Concluded | Quiesced] = {}
        self._concluded: Concluded | None = None
        self._peer_dead = False

    # What the caller may ask -----------------------------------------------------------------

    @property
    def quiescent(self) -> bool:
        """No write of this rank can land, or read the source pages, any more."""
        return self.state in (PrefillState.SUCCEEDED, PrefillState.FAILED)

    @property
    def finished(self) -> bool:
        """Quiescent, and decode has acknowledged it or is dead: the session may be dropped."""
        return self.quiescent and not self._unacknowledged

    # Events of this process ------------------------------------------------------------------

    def chunk_ready(
        self,
        chunk: int,
        source_physical_pages: PhysicalPages,
        positions: Positions,
        *,
        last: bool,
    ) -> list[PrefillAction]:
        """The writes of a chunk's KV are done; these owned pages are complete and may be sent.

        `source_physical_pages` and `positions` (of the request, absolute): int64[pages], both
        empty where this rank owns none. Call it for each chunk up to the `last`. The same call
        again is ignored; another under the same chunk number, or a chunk behind the last, fails
        the room. Ignored once the room has failed. ProtocolError, with nothing changed, after
        success for anything but the same call again.
        """
        if self.state in (PrefillState.DRAINING, PrefillState.FAILED):
            return []
        try:
            sources = as_int64("source page", source_physical_pages)
            absolute = as_int64("position", positions)
            key = (pack_int64(sources), pack_int64(absolute), last)
            if chunk in self._chunks:
                if self._chunks[chunk] == key:
                    return []
                raise LayoutError(f"chunk {chunk} came twice, with different pages")
            if self.state is not PrefillState.OPEN:
                raise LayoutError(f"chunk {chunk} came behind the last chunk")
            relative, owed_sources = self._owed(chunk, sources, absolute)
            self._cover.add(relative, f"chunk {chunk}")
        except LayoutError as error:
            if self.state is PrefillState.SUCCEEDED:  # decode may be using the pages
                raise ProtocolError(f"room {self.room} has concluded", value=str(error)) from error
            return self._fail(f"rank {self.rank}: {error}")
        self._chunks[chunk] = key
        actions: list[PrefillAction] = []
        if len(relative):
            self._unsettled[chunk] = relative
            destinations = self.reservation.destinations(relative)
            actions.append(SubmitWrite(chunk, owed_sources, destinations))
        if last:
            self.state = PrefillState.FLUSHING
        return actions + self._conclude_when_flushed()

    def write_done(
        self, chunk: int, descriptors: int, nbytes: int, checksums: bytes = b""
    ) -> list[PrefillAction]:
        """Every byte of the chunk has landed, in so many merged ranges. Once a SubmitWrite.

        `checksums` (int64, in the order of the SubmitWrite's pages) go to decode with it.
        """
        positions = self._settle(chunk)
        if positions is None:
            return []
        if self.failure is not None:
            return self._quiesce_when_drained()
        sent = Sent(
            epoch=self.epoch,
            peer_epoch=self.peer_epoch,
            room=self.room,
            rank=self.rank,
            chunk=chunk,
            positions=pack_int64(positions),
            descriptors=descriptors,
            nbytes=nbytes,
            checksums=checksums,
        )
        self._sent.append(sent)
        return [*self._messages(sent), *self._conclude_when_flushed()]

    def write_failed(self, chunk: int, reason: str, *, quiescent: bool) -> list[PrefillAction]:
        """The chunk did not land in full. `quiescent` as TransferError has it.

        False keeps the source pages until `drained`.
        """
        if quiescent:
            if self._settle(chunk) is None:
                return []
        elif chunk in self._unsettled:
            self._strays.add(chunk)
        else:
            self._check_settled(chunk)
            return []
        if self.failure is not None:
            return self._quiesce_when_drained()
        return self._fail(f"rank {self.rank}, chunk {chunk}: {reason}")

    def drained(self) -> list[PrefillAction]:
        """The transport proves that no write of this room can land, ended or not.

        What it says of single writes later is ignored. InvariantError while the room has not
        failed: more writes would follow.
        """
        if self.failure is None:
            raise InvariantError("a room was drained that had not failed", value=self.room)
        self._settled.update(self._unsettled)
        self._unsettled.clear()
        self._strays.clear()
        return self._quiesce_when_drained()

    def abort(self, reason: str) -> list[PrefillAction]:
        """Stop: submit nothing more, conclude as failed. Ignored once the room has concluded.

        Also for a decode worker that is unreachable: the conclusion waits for its return.
        """
        if self._concluded is not None:
            return []
        return self._fail(reason)

    def peer_dead(self, reason: str) -> list[PrefillAction]:
        """Decode's process is proven to be gone: nobody is told, nothing is acknowledged."""
        self._peer_dead = True
        self._unacknowledged.clear()
        return self.abort(reason)

    def resend_due(self) -> list[PrefillAction]:
        """Decode has been silent for a while: say again what it has not acknowledged."""
        actions: list[PrefillAction] = []
        for message in self._unacknowledged.values():
            if isinstance(message, Concluded) and message.outcome == "success":
                actions += self._messages(*self._sent)
            actions += self._messages(message)
        return actions

    # Events of the link ----------------------------------------------------------------------

    def receive(self, message: Message) -> list[PrefillAction]:
        """Take Acknowledged or AbortRoom from decode.

        ProtocolError, with nothing changed, for any other message, another room or rank, an
        earlier life on either side, or an acknowledgement of what was never said.
        """
        if not isinstance(message, Acknowledged | AbortRoom):
            raise ProtocolError(
                "message is not for a sending room",
                value=type(message).__name__,
                allowed="Acknowledged, AbortRoom",
            )
        message.check_address(room=self.room, sender=self.peer_epoch, receiver=self.epoch)
        if isinstance(message, AbortRoom):
            return self.abort(f"decode stopped the room: {message.reason}")
        if message.rank != self.rank:
            raise ProtocolError(
                "message for another rank", value=message.rank, allowed=str(self.rank)
            )
        if self._concluded is None or (
            message.of == "quiesced" and (self._concluded.quiescent or not self.quiescent)
        ):
            raise ProtocolError("acknowledged what was never said", value=message.of)
        self._unacknowledged.pop(message.of, None)
        return []

    # Checks ----------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise InvariantError if what was submitted, sent and concluded does not add up."""
        in_flight = sum(len(positions) for positions in self._unsettled.values())
        sent = self._sent_positions()
        claims = {
            "a failure has a reason": (self.failure is not None)
            == (self.state in (PrefillState.DRAINING, PrefillState.FAILED)),
            "only a failed room has strays": self.failure is not None or not self._strays,
            "strays are unsettled writes": self._strays <= set(self._unsettled),
            "quiescent means no unsettled write": not (self.quiescent and self._unsettled),
            "draining means unsettled writes": self.state is not PrefillState.DRAINING
            or bool(self._unsettled),
            "covered positions are in flight or sent": self.failure is not None
            or self._cover.count == in_flight + sent,
            "an ended room is concluded": (self._concluded is not None)
            == (self.state not in (PrefillState.OPEN, PrefillState.FLUSHING)),
            "success counts what was sent": self.state is not PrefillState.SUCCEEDED
            or (self._concluded is not None and self._concluded.total_positions == sent),
        }
        for claim, holds in claims.items():
            if not holds:
                raise InvariantError(f"room {self.room}, rank {self.rank}: not so: {claim}")

    # Steps -----------------------------------------------------------------------------------

    def _owed(
        self, chunk: int, sources: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> tuple[Positions, PhysicalPages]:
        """The pages that decode does not hold yet, by position in the reservation."""
        if sources.shape != positions.shape or positions.ndim != 1:
            raise LayoutError(
                f"chunk {chunk} has source pages and positions of different shape",
                value=f"{sources.shape} and {positions.shape}",
                allowed="two lists of one length",
            )
        if len(sources) and int(sources.min()) < 1:
            raise LayoutError(
                f"chunk {chunk} has a source page that is none",
                value=int(sources.min()),
                allowed=">= 1",
            )
        if len(positions) and int(positions.min()) < 0:
            raise LayoutError(
                f"chunk {chunk} has a position before the prompt",
                value=int(positions.min()),
                allowed=">= 0",
            )
        first = self.reservation.first_position
        owed = positions >= first
        return Positions(positions[owed] - first), PhysicalPages(sources[owed])

    def _settle(self, chunk: int) -> Positions | None:
        positions = self._unsettled.pop(chunk, None)
        if positions is None:
            self._check_settled(chunk)
            return None
        self._strays.discard(chunk)
        self._settled.add(chunk)
        return positions

    def _check_settled(self, chunk: int) -> None:
        if chunk not in self._settled:
            raise InvariantError("a write ended that was never submitted", value=chunk)

    def _conclude_when_flushed(self) -> list[PrefillAction]:
        if self.state is not PrefillState.FLUSHING or self._unsettled:
            return []
        self.state = PrefillState.SUCCEEDED
        return [*self._conclude("success"), ReleaseSources(self.room)]

    def _fail(self, reason: str) -> list[PrefillAction]:
        self.failure = as_reason(reason)
        self.state = PrefillState.DRAINING if self._unsettled else PrefillState.FAILED
        actions = self._conclude("failed", self.failure)
        return actions if self._unsettled else [*actions, ReleaseSources(self.room)]

    def _quiesce_when_drained(self) -> list[PrefillAction]:
        if self.state is not PrefillState.DRAINING or self._unsettled:
            return []
        self.state = PrefillState.FAILED
        quiesced = Quiesced(
            epoch=self.epoch, peer_epoch=self.peer_epoch, room=self.room, rank=self.rank
        )
        return [*self._say("quiesced", quiesced), ReleaseSources(self.room)]

    def _conclude(
        self, outcome: Literal["success", "failed"], reason: str = ""
    ) -> list[PrefillAction]:
        self._concluded = Concluded(
            epoch=self.epoch,
            peer_epoch=self.peer_epoch,
            room=self.room,
            rank=self.rank,
            outcome=outcome,
            reason=reason,
            quiescent=not self._unsettled,
            sent_chunks=len(self._sent),
            total_positions=self._sent_positions(),
        )
        return self._say("concluded", self._concluded)

    def _say(self, what: str, message: Concluded | Quiesced) -> list[PrefillAction]:
        if not self._peer_dead:
            self._unacknowledged[what] = message
        return self._messages(message)

    def _messages(self, *messages: Sent | Concluded | Quiesced) -> list[PrefillAction]:
        return [] if self._peer_dead else [SendMessage(message) for message in messages]

    def _sent_positions(self) -> int:
        return sum(len(message.position_array()) for message in self._sent)

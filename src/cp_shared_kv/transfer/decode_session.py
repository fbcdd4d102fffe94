r"""One room at decode: what has arrived, whether it is all, and when its pages are safe to reuse.

Events are method calls and return the actions to take, in order. No I/O, no clock, no threads.

    RECEIVING --all N heard, exact cover--> COVERED
        \--any failure--> QUARANTINED --all N quiescent or dead--> FREED
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from cp_shared_kv.errors import InvariantError, LayoutError, ProtocolError
from cp_shared_kv.layout.coverage import ExactCover
from cp_shared_kv.transfer.actions import (
    Covered,
    DecodeAction,
    FreePages,
    RoomFailed,
    SendMessage,
)
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Acknowledged,
    Concluded,
    Message,
    Quiesced,
    Released,
    Sent,
    Withdrawn,
    as_reason,
)
from cp_shared_kv.transfer.reservation import Reservation


class DecodeState(Enum):
    """Where a room stands at decode."""

    RECEIVING = "receiving"
    """Pages may arrive."""
    COVERED = "covered"
    """Every page arrived once; the pages belong to the request."""
    QUARANTINED = "quarantined"
    """Failed; a write may still land in the reservation."""
    FREED = "freed"
    """Failed, and the reservation's pages are free."""


@dataclass
class _Rank:
    """What decode knows of one sender."""

    sent: dict[int, Sent] = field(default_factory=dict[int, Sent])
    concluded: Concluded | None = None
    quiesced: bool = False
    withdrawn: bool = False
    dead: bool = False
    contradicts_itself: bool = False

    @property
    def heard(self) -> bool:
        """It concluded with success, and every Sent that it counts has arrived."""
        return (
            self.concluded is not None
            and self.concluded.outcome == "success"
            and len(self.sent) == self.concluded.sent_chunks
        )

    @property
    def quiescent(self) -> bool:
        """No write of this rank can land. Two different conclusions prove nothing: then only
        its death does."""
        if self.dead or self.contradicts_itself:
            return self.dead
        concluded_quiescent = self.concluded is not None and self.concluded.quiescent
        return self.quiesced or self.withdrawn or concluded_quiescent


class DecodeSession:
    """The receiving side of a room: N ranks send, each concludes once.

    `epoch` is this decode worker's life and `peer_epoch` the prefill group's; messages of any
    other are refused. Messages may come in any order, more than once, and be lost as long as
    the ranks repeat what is not acknowledged: a conclusion is acknowledged only when every Sent
    that it counts is here, and a rank repeats those with it. The room is covered when all N are
    heard, so the order between ranks, or between one rank's messages, never matters.

    Returns exactly one of Covered and RoomFailed in its life; after RoomFailed, FreePages once.
    """

    def __init__(
        self, room: int, epoch: int, peer_epoch: int, cp_size: int, reservation: Reservation
    ) -> None:
        self.room = room
        self.epoch = epoch
        self.peer_epoch = peer_epoch
        self.reservation = reservation
        self.state = DecodeState.RECEIVING
        self.failure: str | None = None
        self._ranks = [_Rank() for _ in range(cp_size)]
        self._cover = ExactCover(reservation.size)
        self._peer_dead = False

    # What the caller may ask -----------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Covered or freed: the session may be dropped.

        A rank whose acknowledgement was lost will repeat itself: answer with `acknowledgement`.
        """
        return self.state in (DecodeState.COVERED, DecodeState.FREED)

    def claims(self) -> list[Sent]:
        """What a covered room's ranks say they have sent: positions, and checksums if agreed."""
        return [sent for record in self._ranks for sent in record.sent.values()]

    def waiting_for(self) -> list[int]:
        """The ranks that are not heard (while receiving) or not quiescent (in quarantine)."""
        if self.state is DecodeState.RECEIVING:
            return [rank for rank, record in enumerate(self._ranks) if not record.heard]
        if self.state is DecodeState.QUARANTINED:
            return [rank for rank, record in enumerate(self._ranks) if not record.quiescent]
        return []

    # Events of this process ------------------------------------------------------------------

    def abort(self, reason: str) -> list[DecodeAction]:
        """Give the room up: the client left, or it took too long. Ignored once it is over."""
        return self._fail(reason, tell_peer=True)

    def peer_dead(self, reason: str) -> list[DecodeAction]:
        """The whole prefill group was reaped, and nobody is left to be told."""
        self._peer_dead = True
        for record in self._ranks:
            record.dead = True
        return self._fail(reason, tell_peer=False) + self._free()

    def resend_due(self) -> list[DecodeAction]:
        """Prefill has been silent for a while: repeat the abort to ranks that go on."""
        if self.state is not DecodeState.QUARANTINED or self._all_concluded():
            return []
        return self._tell_abort()

    # Events of the link ----------------------------------------------------------------------

    def receive(self, message: Message) -> list[DecodeAction]:
        """Take Sent, Concluded, Quiesced, Withdrawn or AbortRoom from prefill.

        The identical message again changes nothing. A different one under the same key (rank
        and chunk, or rank and conclusion) fails the room. ProtocolError, with nothing changed,
        for any other message, another room, an earlier life on either side, a rank that does
        not exist, or a contradiction of a room that is over.
        """
        if not isinstance(message, Sent | Concluded | Quiesced | Withdrawn | AbortRoom):
            raise ProtocolError(
                "message is not for a receiving room",
                value=type(message).__name__,
                allowed="Sent, Concluded, Quiesced, Withdrawn, AbortRoom",
            )
        message.check_address(room=self.room, sender=self.peer_epoch, receiver=self.epoch)
        match message:
            case AbortRoom():
                return self._fail(f"prefill stopped the room: {message.reason}", tell_peer=False)
            case Withdrawn():
                return self._take_withdrawn(message)
            case Sent():
                return self._take_sent(message, self._rank(message.rank))
            case Concluded():
                return self._take_concluded(message, self._rank(message.rank))
            case Quiesced():
                return self._take_quiesced(message, self._rank(message.rank))

    # Checks ----------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Raise InvariantError if what was heard, covered and freed does not add up."""
        sent = [message for record in self._ranks for message in record.sent.values()]
        claims = {
            "a failure has a reason": (self.failure is not None)
            == (self.state in (DecodeState.QUARANTINED, DecodeState.FREED)),
            "covered positions are those that were sent": self.state is not DecodeState.RECEIVING
            or self._cover.count == sum(len(message.position_array()) for message in sent),
            "covered means an exact cover by all ranks": self.state is not DecodeState.COVERED
            or (self._cover.complete and all(record.heard for record in self._ranks)),
            "freed means quiescent": self.state is not DecodeState.FREED or self._all_quiescent(),
            "quarantined means not quiescent": self.state is not DecodeState.QUARANTINED
            or not self._all_quiescent(),
        }
        for claim, holds in claims.items():
            if not holds:
                raise InvariantError(f"room {self.room} at decode: not so: {claim}")

    # Steps -----------------------------------------------------------------------------------

    def _take_sent(self, message: Sent, record: _Rank) -> list[DecodeAction]:
        if self.state in (DecodeState.QUARANTINED, DecodeState.FREED):
            return []
        source = f"rank {message.rank}, chunk {message.chunk}"
        known = record.sent.get(message.chunk)
        if known == message:
            return []
        if self.state is DecodeState.COVERED:
            raise ProtocolError(f"room {self.room} is covered, and more was sent", value=source)
        if known is not None:
            return self._fail(f"{source} was sent twice, with different pages", tell_peer=True)
        try:
            self._cover.add(message.position_array(), source)
        except LayoutError as error:
            return self._fail(str(error), tell_peer=True)
        record.sent[message.chunk] = message
        return self._hear(record)

    def _take_concluded(self, message: Concluded, record: _Rank) -> list[DecodeAction]:
        known = record.concluded
        if known is not None and known != message:
            return self._contradiction(message.rank, record, "concluded twice, differently")
        if known is not None:  # a repeat: the acknowledgement or some Sent was lost
            waits = self.state is DecodeState.RECEIVING and not record.heard
            return [] if waits else [SendMessage(acknowledgement(message))]
        if record.quiesced and message.outcome == "success":
            return self._contradiction(message.rank, record, "failed, then concluded a success")
        record.concluded = message
        if message.outcome == "success" and self.state is DecodeState.RECEIVING:
            return self._hear(record)
        acknowledged = SendMessage(acknowledgement(message))
        if message.outcome == "failed":
            return [acknowledged, *self._fail(message.reason, tell_peer=True), *self._free()]
        return [acknowledged, *self._free()]

    def _take_quiesced(self, message: Quiesced, record: _Rank) -> list[DecodeAction]:
        """May overtake its Concluded: the room fails by that one, which names the reason."""
        if record.concluded is not None and record.concluded.outcome == "success":
            return self._contradiction(message.rank, record, "succeeded, then quiesced a failure")
        record.quiesced = True
        return [SendMessage(acknowledgement(message)), *self._free()]

    def _take_withdrawn(self, message: Withdrawn) -> list[DecodeAction]:
        """The controller's word that no rank has the room open stands for all of them."""
        if self.finished:
            return []
        for record in self._ranks:
            record.withdrawn = True
        failed = self._fail(f"prefill withdrew the room: {message.reason}", tell_peer=False)
        return failed + self._free()

    def _hear(self, record: _Rank) -> list[DecodeAction]:
        """Something of a rank arrived: is the rank complete, and with it the room?"""
        concluded = record.concluded
        if concluded is None or len(record.sent) < concluded.sent_chunks:
            return []
        positions = sum(len(sent.position_array()) for sent in record.sent.values())
        if not record.heard or positions != concluded.total_positions:
            return self._fail(
                f"rank {concluded.rank} sent {positions} pages in {len(record.sent)} chunks, but "
                f"concluded {concluded.total_positions} in {concluded.sent_chunks}",
                tell_peer=True,
            )
        acknowledged = SendMessage(acknowledgement(concluded))
        if not all(other.heard for other in self._ranks):
            return [acknowledged]
        if not self._cover.complete:
            missing = self._cover.missing()
            listed = ", ".join(str(position) for position in missing[:8].tolist())
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            reason = (
                f"all {len(self._ranks)} CP ranks concluded, but nobody sent {len(missing)} of "
                f"{self.reservation.size} pages: positions {listed}{more}"
            )
            return [acknowledged, *self._fail(reason, tell_peer=False)]
        self.state = DecodeState.COVERED
        return [acknowledged, Covered(self.room), *self._release()]

    def _contradiction(self, rank: int, record: _Rank, what: str) -> list[DecodeAction]:
        if self.finished:
            raise ProtocolError(f"room {self.room} is over, and CP rank {rank} {what}")
        record.contradicts_itself = True
        return self._fail(f"CP rank {rank} {what}", tell_peer=True)

    def _fail(self, reason: str, *, tell_peer: bool) -> list[DecodeAction]:
        if self.state is not DecodeState.RECEIVING:
            return []
        self.state = DecodeState.QUARANTINED
        self.failure = as_reason(reason)
        for record in self._ranks:
            record.sent.clear()
        told = self._tell_abort() if tell_peer and not self._all_concluded() else []
        failed = RoomFailed(self.room, self.failure)
        return [failed, *told, *self._free()]

    def _free(self) -> list[DecodeAction]:
        if self.state is not DecodeState.QUARANTINED or not self._all_quiescent():
            return []
        self.state = DecodeState.FREED
        return [FreePages(self.room), *self._release()]

    def _all_quiescent(self) -> bool:
        return all(record.quiescent for record in self._ranks)

    def _all_concluded(self) -> bool:
        return all(record.dead or record.concluded is not None for record in self._ranks)

    def _release(self) -> list[DecodeAction]:
        if self._peer_dead:
            return []
        released = Released(epoch=self.epoch, peer_epoch=self.peer_epoch, room=self.room)
        return [SendMessage(released)]

    def _tell_abort(self) -> list[DecodeAction]:
        assert self.failure is not None
        message = AbortRoom(
            epoch=self.epoch, peer_epoch=self.peer_epoch, room=self.room, reason=self.failure
        )
        return [SendMessage(message)]

    def _rank(self, rank: int) -> _Rank:
        if rank >= len(self._ranks):
            raise ProtocolError(
                "message of a CP rank that does not exist",
                value=rank,
                allowed=f"0..{len(self._ranks) - 1}",
            )
        return self._ranks[rank]


def acknowledgement(message: Concluded | Quiesced) -> Acknowledged:
    """The answer to a rank's last word; also to one about a room that decode has dropped.

    Check the message's epochs before: an earlier life gets no answer.
    """
    return Acknowledged(
        epoch=message.peer_epoch,
        peer_epoch=message.epoch,
        room=message.room,
        rank=message.rank,
        of="concluded" if isinstance(message, Concluded) else "quiesced",
    )

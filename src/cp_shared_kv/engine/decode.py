"""The decode worker: sets pages aside, waits for exact cover, and generates tokens.

One process, one model replica, its own pool. All requests that run share each forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from cp_shared_kv.engine.api import RefusalKind
from cp_shared_kv.engine.codecs import encode
from cp_shared_kv.engine.decode_reservation import WaitingRooms, declined
from cp_shared_kv.engine.decode_room import DecodeRoom, PrefillPeer
from cp_shared_kv.engine.decode_running import RunningRooms
from cp_shared_kv.engine.messages import DecodeStats, RoomRefused, Tokens
from cp_shared_kv.engine.model_runner import ModelRunner
from cp_shared_kv.engine.quarantine import QuarantineWatch
from cp_shared_kv.engine.recording import MessageLog
from cp_shared_kv.engine.sampling.sampler import SampledToken
from cp_shared_kv.engine.sampling.state import SamplingState, prompt_tokens_for_sampling
from cp_shared_kv.engine.self_check import broken
from cp_shared_kv.engine.verification import Checksums, damaged_page
from cp_shared_kv.errors import InvariantError, ProtocolError
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.transfer.actions import (
    Covered,
    DecodeAction,
    FreePages,
    RoomFailed,
    SendMessage,
)
from cp_shared_kv.transfer.decode_session import DecodeState, acknowledgement
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Acknowledged,
    Concluded,
    Declined,
    FirstToken,
    Offer,
    Quiesced,
    Sent,
    Withdrawn,
    as_reason,
)

logger = logging.getLogger("cp_shared_kv")
SendTo = Callable[[msgspec.Struct], None]


class DecodeEngine:
    """Logic of a decode worker. `to_server` and the peers send; nothing blocks.

    Events name the prefill group that they come from: rooms of one group are closed to others.
    `cp_size` is the ranks of each group; pages that are in quarantine for longer than
    `quarantine_seconds` are a problem. With `checksums` of this worker's pages, a room whose
    pages differ from what its ranks have sent fails.
    """

    def __init__(
        self,
        pool: LogicalPool,
        runner: ModelRunner,
        *,
        epoch: int,
        cp_size: int,
        max_running: int,
        quarantine_seconds: float,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        to_server: SendTo,
        checksums: Checksums | None = None,
        log: MessageLog | None = None,
    ) -> None:
        self._pool = pool
        self._epoch = epoch
        self._quarantine = QuarantineWatch(quarantine_seconds)
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._to_server = to_server
        self._checksums = checksums
        self._log = log
        self._rooms: dict[int, DecodeRoom] = {}
        self._waiting = WaitingRooms(pool, epoch=epoch, cp_size=cp_size)
        self._running = RunningRooms(
            pool,
            runner,
            epoch=epoch,
            max_running=max_running,
            to_server=to_server,
            record=self._record,
            release=self._release,
            fail=self._fail,
        )
        self.failed_transfers_total = 0

    # Events -----------------------------------------------------------------------------------

    def on_offer(self, peer: PrefillPeer, offer: Offer) -> None:
        """Queue an offer; it is reserved as soon as its pages are free, in order of arrival."""
        self._check_epochs(peer, offer)
        known = self._rooms.get(offer.room)
        if known is not None:
            if known.peer is not peer:
                raise ProtocolError("room of another prefill group", value=offer.room)
            return
        try:
            sampling = SamplingState(
                offer.sampling,
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos,
                prompt_token_ids=prompt_tokens_for_sampling(offer.sampling, offer.tokens()),
            )
        except ProtocolError as error:
            self._decline(peer, offer.room, str(error))
            return
        room = DecodeRoom(peer, offer, len(offer.token_ids) // 8, sampling)
        self._rooms[offer.room] = room
        self._waiting.add(offer.room, room)
        self._reserve_waiting()

    def on_transfer(self, peer: PrefillPeer, message: Sent | Concluded | Quiesced) -> None:
        """A rank reports on its part of a room."""
        room = self._room(peer, message.room)
        if room is not None and room.session is not None:
            self._carry_out(message.room, room.session.receive(message))
        elif not isinstance(message, Sent):
            # The room is over and the rank has not heard our answer: give it again.
            self._check_epochs(peer, message)
            peer.to_rank(message.rank, acknowledgement(message))

    def on_first_token(self, peer: PrefillPeer, message: FirstToken) -> None:
        """The token that prefill's logits chose."""
        self._check_epochs(peer, message)
        if message.token_id >= self._vocab_size:
            raise ProtocolError(
                f"the first token of room {message.room} is not in the vocabulary",
                value=message.token_id,
                allowed=f"0 to {self._vocab_size - 1}",
            )
        room = self._room(peer, message.room)
        if room is not None and room.first_token is None:
            room.first_token = SampledToken(message.token_id, message.logprobs)
            self._start_if_ready(message.room)

    def on_stop(self, peer: PrefillPeer, message: AbortRoom | Withdrawn) -> None:
        """The request is wanted no more; its pages go when no rank can still write them."""
        self._check_epochs(peer, message)
        room = self._room(peer, message.room)
        if room is not None:
            room.stopped = True
            if room.session is None or room.session.state is DecodeState.COVERED:
                self._stop(message.room)
            else:
                self._carry_out(message.room, room.session.receive(message))

    def cancel(self, name: int, reason: str) -> None:
        """The server wants no more of it. A room that is still prefill's concern ends there too."""
        room = self._rooms.get(name)
        if room is None:
            return
        room.stopped = True
        reason = as_reason(reason)
        if room.session is None:
            self._decline(room.peer, name, reason)
            self._stop(name)
        elif room.session.state is not DecodeState.COVERED:
            self._carry_out(name, room.session.abort(reason))
        elif name in self._running:
            self._stop(name)
        else:  # prefill may be through with it, and says no more
            self._to_server(Tokens(room=name, token_ids=[], finish_reason="abort"))
            self._stop(name)

    def peer_dead(self, peer: PrefillPeer, reason: str) -> None:
        """Every process of a prefill group was reaped. What has all its pages and its first token
        goes on; the server sends the others elsewhere, as it has had no token of them."""
        reason = as_reason(reason)
        for name in [name for name in self._waiting if self._rooms[name].peer is peer]:
            self._stop(name)  # the server offers it to another group
        for name, room in list(self._rooms.items()):
            if room.peer is not peer or name in self._running or room.session is None:
                continue
            if room.session.state is DecodeState.COVERED:  # its first token will never come
                self._fail(name, reason, "unavailable")
            else:
                self._carry_out(name, room.session.peer_dead(reason), failed_as="unavailable")

    def awaits_pages_of(self, peer: PrefillPeer) -> bool:
        """Whether something that this group has begun to write may yet land in one of its rooms."""
        over = (DecodeState.COVERED, DecodeState.FREED)
        return any(
            room.peer is peer and room.session is not None and room.session.state not in over
            for room in self._rooms.values()
        )

    def server_lost(self, reason: str) -> None:
        """Nobody waits for any answer any more."""
        for name in [*self._waiting, *self._rooms]:  # else those that wait take the freed pages
            self.cancel(name, reason)

    def _stop(self, name: int) -> None:
        """Drop a room that is waiting or covered: no rank can write to it."""
        room = self._rooms[name]
        if name in self._running:
            self._running.abort(name)
        elif room.session is None:
            self._waiting.remove(name)
            del self._rooms[name]
            self._reserve_waiting()  # it may have been what held the others up
        else:
            self._release(name)  # only its first token was missing

    def _room(self, peer: PrefillPeer, name: int) -> DecodeRoom | None:
        room = self._rooms.get(name)
        if room is not None and room.peer is not peer:
            raise ProtocolError(f"{peer.life} speaks of a room of {room.peer.life}", value=name)
        return room

    def _check_epochs(
        self,
        peer: PrefillPeer,
        message: Offer | FirstToken | AbortRoom | Withdrawn | Concluded | Quiesced,
    ) -> None:
        message.check_address(room=message.room, sender=peer.epoch, receiver=self._epoch)

    # Steps ------------------------------------------------------------------------------------

    @property
    def open_rooms(self) -> int:
        """Rooms that are offered, receiving or decoding."""
        return len(self._rooms)

    @property
    def has_work(self) -> bool:
        """Whether a decode step would do anything."""
        return len(self._running) > 0

    def step(self) -> None:
        """One token for every running request."""
        self._running.step()

    def stats(self, ticket: int) -> DecodeStats:
        """Figures of this worker, in tokens."""
        return DecodeStats(
            ticket=ticket,
            used_tokens=self._pool.locked_pages * self._pool.page_size,
            waiting=len(self._waiting),
            running=len(self._running),
            generated_tokens_total=self._running.generated_total,
            failed_transfers_total=self.failed_transfers_total,
        )

    def check_invariants(self) -> None:
        """Raise `InvariantError` if rooms, sessions and the pool disagree."""
        self._pool.check_invariants()
        holding = {name for name, room in self._rooms.items() if room.logical_pages is not None}
        if set(self._pool.rooms) != holding:
            raise InvariantError("decode rooms that hold pages are not those of the pool")
        for room in self._rooms.values():
            if room.session is not None:
                room.session.check_invariants()

    def problems(self, now_seconds: float) -> list[str]:
        """What does not add up, and which rooms have been in quarantine for too long."""
        return broken([self.check_invariants]) + self._quarantine.overdue(self._rooms, now_seconds)

    # Reservation ------------------------------------------------------------------------------

    def _reserve_waiting(self) -> None:
        for room, answer in self._waiting.answers():
            if isinstance(answer, Declined):
                del self._rooms[answer.room]
                self.failed_transfers_total += 1
            else:
                self._record(answer)
            room.peer.to_controller(answer)

    def _decline(self, peer: PrefillPeer, name: int, reason: str) -> None:
        peer.to_controller(declined(peer, name, reason, epoch=self._epoch))

    # Actions of the sessions ------------------------------------------------------------------

    def _carry_out(
        self, name: int, actions: list[DecodeAction], failed_as: RefusalKind = "failed"
    ) -> None:
        peer = self._rooms[name].peer
        for action in actions:
            match action:
                case SendMessage():
                    if isinstance(action.message, Acknowledged):
                        peer.to_rank(action.message.rank, action.message)
                    else:
                        peer.to_controller(action.message)
                case Covered():
                    self._covered(name)
                case RoomFailed():
                    self.failed_transfers_total += not self._rooms[name].stopped
                    self._to_server(RoomRefused(room=name, kind=failed_as, reason=action.reason))
                case FreePages():
                    self._release(name)

    def _covered(self, name: int) -> None:
        """Every page is here, and no rank writes any more."""
        session = self._rooms[name].session
        assert session is not None
        damage = None if self._checksums is None else damaged_page(session, self._checksums)
        if damage is None:
            self._start_if_ready(name)
        else:
            self.failed_transfers_total += 1
            self._fail(name, damage)

    def _fail(self, name: int, reason: str, kind: RefusalKind = "failed") -> None:
        """End a covered room with an error. Its pages are not kept for other prompts."""
        logger.error("room %d: %s", name, reason)
        self._to_server(RoomRefused(room=name, kind=kind, reason=reason))
        self._release(name)

    def _start_if_ready(self, name: int) -> None:
        room = self._rooms[name]
        if (
            room.first_token is None
            or room.session is None
            or room.session.state is not DecodeState.COVERED
        ):
            return
        self._record(
            FirstToken(
                epoch=self._epoch,
                peer_epoch=room.peer.epoch,
                room=name,
                token_id=room.first_token.token_id,
            )
        )
        self._running.start(name, room, room.first_token)

    def _release(self, name: int) -> None:
        if self._rooms.pop(name, None) is not None:
            self._pool.release(name)
            self._reserve_waiting()

    def _record(self, message: msgspec.Struct) -> None:
        if self._log is not None:
            self._log.append(encode(message))

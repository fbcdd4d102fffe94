"""Who speaks at a decode worker's door: greetings first, then each message with its sender. No I/O.

A prefill group that does not fit is refused, with what differs, and harms no other group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from cp_shared_kv.engine.codecs import TO_DECODE, ToDecode
from cp_shared_kv.engine.decode_room import PrefillPeer
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.errors import HandshakeError, ProtocolError
from cp_shared_kv.transfer.messages import Concluded, Hello, Quiesced, Sent
from cp_shared_kv.transfer.rendezvous import check_hello, read_hello


class DecodeDoor:
    """The prefill groups that this worker has shaken hands with.

    `mine` is the worker's greeting, `send` puts a message on the link to an identity, and
    `is_idle` says whether no room is open: only then may a group greet again.
    """

    def __init__(
        self,
        mine: Hello,
        *,
        send: Callable[[bytes, msgspec.Struct], None],
        is_idle: Callable[[], bool],
    ) -> None:
        self._mine = mine
        self._send = send
        self._is_idle = is_idle
        self._peers: dict[Life, PrefillPeer] = {}
        self._dead: set[Life] = set()

    def admit(self, sender: bytes, data: bytes) -> tuple[PrefillPeer, ToDecode] | None:
        """What came from `sender`, the identity that its link gives it. None: it was a greeting.

        ProtocolError, with nothing changed, for anything malformed, in another's name or out of
        turn; HandshakeError for a group that does not fit, which has been sent our greeting.
        """
        group, _, _ = sender.partition(b"/")
        life = Life.parse(group)
        if life.role != "prefill":
            raise ProtocolError("only prefill groups have business here", value=str(life))
        peer = self._peers.get(life)
        if peer is None:
            # The first word is a greeting, of whatever release.
            if sender != life.identity:
                raise ProtocolError("a message before the handshake", value=repr(sender[:40]))
            self._greet(life, data)
            return None
        message = TO_DECODE.decode(data)
        expected = life.identity
        if isinstance(message, Sent | Concluded | Quiesced):
            expected = life.rank_identity(message.rank)
        if sender != expected:
            raise ProtocolError(
                f"{type(message).__name__} comes from another than its sender",
                value=repr(sender[:40]),
                allowed=repr(expected),
            )
        if isinstance(message, Hello):
            if not self._is_idle():
                raise ProtocolError("a greeting while rooms are open", value=str(life))
            self._greet(life, data)
            return None
        return peer, message

    def lost(self, life: Life) -> PrefillPeer | None:
        """A group's life is over: it is not heard again. Returns its peer, if it had greeted."""
        self._dead.add(life)
        return self._peers.pop(life, None)

    def _greet(self, life: Life, data: bytes) -> None:
        if life in self._dead:
            raise ProtocolError("a greeting of a group that is gone", value=str(life))
        # Ours goes out before the check: both sides refuse, with the same reason.
        try:
            theirs = read_hello(data, self._mine)
        except HandshakeError:
            self._send(life.identity, self._mine)
            raise
        self._send(life.identity, self._mine)
        check_hello(self._mine, theirs)
        self._peers[life] = PrefillPeer(
            life,
            theirs.epoch,
            to_controller=partial(self._send, life.identity),
            to_rank=lambda rank, message: self._send(life.rank_identity(rank), message),
        )

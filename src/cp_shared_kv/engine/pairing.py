"""From the news that a decode worker is up to a pair that can transfer. No I/O of its own.

LINKED --its Hello fits--> MAPPING --every rank has mapped its pool--> PAIRED
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ConnectDecode, DecodeConnected
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.transfer.messages import Hello
from cp_shared_kv.transfer.rendezvous import check_hello


@dataclass(frozen=True, eq=False)
class DecodePeer:
    """A decode worker that this group can send to. `send` puts a message on the link to it."""

    life: Life
    epoch: int
    send: Callable[[msgspec.Struct], None]


class Pairing:
    """The handshake of one prefill group with one life of a decode worker.

    `mine` is the group's greeting, which goes out at once.
    """

    def __init__(
        self,
        mine: Hello,
        decode: Life,
        address: str,
        *,
        cp_size: int,
        send: Callable[[msgspec.Struct], None],
        to_ranks: Callable[[msgspec.Struct], None],
    ) -> None:
        self.decode = decode
        self.mine = mine
        self._address = address
        self._waiting = set(range(cp_size))
        self._send, self._to_ranks = send, to_ranks
        self._theirs: Hello | None = None
        self.failure: str | None = None
        """Why some rank cannot write to it: it is about to be reported gone."""
        send(mine)

    @property
    def epoch(self) -> int | None:
        """The decode worker's epoch, once it has greeted."""
        return None if self._theirs is None else self._theirs.epoch

    def greeted(self, theirs: Hello) -> None:
        """Its Hello: checked, then every rank maps its pool. HandshakeError if it does not fit."""
        if self._theirs is not None:
            raise ProtocolError("a second greeting", value=str(self.decode))
        check_hello(self.mine, theirs)
        self._theirs = theirs
        self._to_ranks(ConnectDecode(address=self._address, hello=theirs))

    def mapped(self, message: DecodeConnected) -> DecodePeer | None:
        """A rank's word on its mapping; the pair, when it is the last and none failed."""
        if self._theirs is None or message.decode_epoch != self._theirs.epoch:
            raise ProtocolError("a mapping that was not asked for", value=message.decode_epoch)
        if message.failure is not None:
            self.failure = self.failure or f"rank {message.rank}: {message.failure}"
        self._waiting.discard(message.rank)
        if self._waiting or self.failure is not None:
            return None
        return DecodePeer(self.decode, self._theirs.epoch, self._send)

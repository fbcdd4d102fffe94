"""All decode workers that a rank's transport knows, and the pools that writes to them may read.

It outlives the rank's epochs: what one has left to be let go, a later one does not wait for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass

from cp_shared_kv.engine.side_calls import SideCalls
from cp_shared_kv.engine.transfer_peer import Answer, PeerState, TransferPeer
from cp_shared_kv.errors import ProtocolError, TransferError
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.transfer.messages import Hello
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import KVTransport

logger = logging.getLogger("cp_shared_kv")


@dataclass(eq=False)
class _FormerPool:
    """The pool of an epoch that is over."""

    region: Region
    peers: list[TransferPeer]
    """Those to which something out of it may be on its way."""
    closed: Callable[[], None]
    told: bool = False
    """That the transport would not forget it yet."""


class TransferPeers:
    """Every method is for the rank's thread; `calls` makes the transport's calls that may take
    long, and `wake` says, from any thread, that `collect` has something to do."""

    def __init__(self, transport: KVTransport, calls: SideCalls, wake: Callable[[], None]) -> None:
        self.transport = transport
        self.wake = wake
        self._calls = calls
        self._peers: list[TransferPeer] = []
        self._former_pools: list[_FormerPool] = []

    def connect(self, hello: Hello, pool: KVPool, answer: Answer) -> None:
        """Reach a decode worker, to which `pool` will be sent; `answer` gets None, or why not.

        If the transport has an earlier connection of the session to forget, after that. Again with
        the same Hello: no effect but the answer. ProtocolError for one without memory, and for
        another under an epoch or a session that is known.
        """
        self._tidy()
        peer = self.of_epoch(hello.epoch)
        if peer is None:
            peer = self._add(hello, pool)
        elif peer.hello != hello:
            raise ProtocolError("a second greeting of a decode worker", value=hello.epoch)
        peer.connect(answer)

    def of_epoch(self, decode_epoch: int) -> TransferPeer | None:
        """The decode worker of that epoch, unless it is being let go."""
        known = (peer for peer in self._peers if peer.hello.epoch == decode_epoch)
        return next((peer for peer in known if not peer.leaving), None)

    def to_find(self) -> list[TransferPeer]:
        """Those that are unreachable and not being looked for."""
        return [peer for peer in self._peers if peer.may_look]

    def collect(self) -> None:
        """Apply what calls have come to that have ended."""
        for peer in list(self._peers):
            peer.collect()
        self._tidy()

    def look(self) -> None:
        """Ask once more what the transport has refused for now. Once a second."""
        for peer in list(self._peers):
            peer.look()
        self._tidy()

    def retire(self, region: Region, closed: Callable[[], None]) -> None:
        """An epoch is over: let all decode workers go, and then forget its registered pool.

        `closed` is called when the transport has: until then the pool's memory must stay.
        """
        peers = list(self._peers)
        for peer in peers:
            peer.let_go(_nothing)
        self._former_pools.append(_FormerPool(region, peers, closed))
        self._tidy()

    def settle(self, limit_seconds: float) -> None:
        """Wait so long for what is being let go, as far as the transport does not refuse to."""
        deadline = time.monotonic() + limit_seconds
        while calls := [peer.call for peer in self._peers if peer.leaving and peer.call]:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                return
            wait(calls, left_seconds, FIRST_COMPLETED)
            self.collect()

    @property
    def unsettled(self) -> list[str]:
        """What has not come to its end yet, for people."""
        told = [
            f"{peer.session_id} is {peer.state.value}"
            for peer in self._peers
            if peer.state not in (PeerState.CONNECTED, PeerState.GONE)
        ]
        return told + [f"{pool.region.name} is registered still" for pool in self._former_pools]

    def _add(self, hello: Hello, pool: KVPool) -> TransferPeer:
        same = [peer for peer in self._peers if peer.session_id == hello.session_id]
        if not all(peer.leaving for peer in same):
            raise ProtocolError("two decode workers with one session", value=hello.session_id)
        earlier = same[-1] if same else None
        peer = TransferPeer(hello, pool, self.transport, self._calls, self.wake, earlier)
        self._peers.append(peer)
        return peer

    def _tidy(self) -> None:
        self._peers = [peer for peer in self._peers if peer.state is not PeerState.GONE]
        former, self._former_pools = self._former_pools, []
        for pool in former:
            if all(peer.state is PeerState.GONE for peer in pool.peers) and self._forgets(pool):
                pool.closed()
            else:
                self._former_pools.append(pool)

    def _forgets(self, pool: _FormerPool) -> bool:
        try:
            self.transport.unregister(pool.region)
        except TransferError as error:
            # The peer is gone, and what is left on the way to it still reads from here.
            if not pool.told:
                logger.warning("kept until it can be given back: %s", error)
            pool.told = True
            return False
        return True


def _nothing() -> None:
    """Nobody's rooms wait for it."""

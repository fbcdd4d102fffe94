r"""One decode worker at the end of a rank's transport. No thread of its own, no clock.

    CONNECTING --> CONNECTED <--> UNREACHABLE
         \-------------\---------------\--> LETTING_GO --> GONE

The transport's calls that may wait for the worker are made beside the rank's work, one at a time;
what they come to is applied by `collect`, on the rank's thread, like every change of state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from cp_shared_kv.engine.side_calls import SideCalls
from cp_shared_kv.errors import InvariantError, ProtocolError, StartupError, TransferError
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.transfer.descriptors import PageAreas
from cp_shared_kv.transfer.messages import Hello
from cp_shared_kv.transfer.transport import KVTransport, PeerInfo

T = TypeVar("T")
Answer = Callable[[str | None], None]

logger = logging.getLogger("cp_shared_kv")


class PeerState(Enum):
    """Where a decode worker stands at one rank."""

    CONNECTING = "being connected"
    CONNECTED = "connected"
    UNREACHABLE = "unreachable"
    """A write to it was lost: nothing is written until the transport has found it again."""
    LETTING_GO = "being let go"
    """Nothing more is written; what was may still land."""
    GONE = "gone"
    """The transport has forgotten it, or has never heard of it: no write to it can land."""


class TransferPeer:
    """What a rank knows of one connection to one life of a decode worker.

    Every method is for the rank's thread. `wake` is called from any thread when a call has ended
    whose result `collect` is to apply. `earlier` is a connection of the same session that has not
    gone: the transport is asked for this one when it has.

    ProtocolError for a Hello without memory.
    """

    def __init__(
        self,
        hello: Hello,
        pool: KVPool,
        transport: KVTransport,
        calls: SideCalls,
        wake: Callable[[], None],
        earlier: TransferPeer | None,
    ) -> None:
        if not hello.regions:
            raise ProtocolError(
                "a decode worker without memory to write to", value=hello.session_id
            )
        self.hello = hello
        self.region = hello.regions[0].name
        """Its pool: what it exposes first."""
        self.areas = PageAreas.between(pool.spec, pool.physical_pages, hello.physical_pages)
        self.state = PeerState.CONNECTING
        self.unreachable: str | None = None
        """How a write to it was lost."""
        self._transport, self._calls, self._wake = transport, calls, wake
        self._earlier = earlier
        self._known_to_transport = False
        self._losses = 0
        self._under_way: tuple[Future[Any], Callable[[Future[Any]], None]] | None = None
        self._answer: Answer = _nothing
        self._gone: Callable[[], None] = _nothing

    @property
    def session_id(self) -> str:
        """What the transport knows it as."""
        return self.hello.session_id

    @property
    def leaving(self) -> bool:
        """It is not to be written to ever again."""
        return self.state in (PeerState.LETTING_GO, PeerState.GONE)

    @property
    def call(self) -> Future[Any] | None:
        """The call of the transport that is under way."""
        return None if self._under_way is None else self._under_way[0]

    def connect(self, answer: Answer) -> None:
        """Have the transport reach it; `answer` gets None when it has, or why it cannot.

        One that cannot be reached is let go. Asked again, the later `answer` takes the place of an
        earlier one that has not been called. One that is let go meanwhile is answered for no more.
        """
        if self.state is PeerState.CONNECTING:
            self._answer = answer
            self._connect_in_turn()
        else:
            answer(self.unreachable)

    def lost(self, how: str) -> None:
        """A write to it has been lost: it is to be found again."""
        self._losses += 1
        if not self.leaving:
            self.state = PeerState.UNREACHABLE
            self.unreachable = self.unreachable or how

    @property
    def may_look(self) -> bool:
        """It is unreachable, and nothing is under way: `find` may be called."""
        return self.state is PeerState.UNREACHABLE and self._under_way is None

    def find(self, found: Callable[[], bool]) -> None:
        """Look for it once more. `found` is called if the transport has found it.

        Then no write that had failed before this call can land any more; of those that failed
        meanwhile nothing is known. `found` returns False if it is to be looked for again.
        """
        if not self.may_look:
            raise InvariantError("looked for a decode worker", value=self.state.value)
        losses = self._losses

        def ended(call: Future[bool]) -> None:
            if call.result() and found() and losses == self._losses:
                self.state, self.unreachable = PeerState.CONNECTED, None

        self._begin(partial(self._transport.revive, self.session_id), ended)

    def let_go(self, gone: Callable[[], None]) -> None:
        """Have the transport forget it; `gone` is called when no write to it can land any more."""
        if self.state is PeerState.GONE:
            gone()
            return
        self._gone = gone
        if self.state is PeerState.LETTING_GO:
            return
        self.state = PeerState.LETTING_GO
        if not self._known_to_transport:
            # An earlier connection of the session may be: that is not this one's to end.
            self._end()
        elif self._under_way is None:
            self._disconnect()
        else:
            # A connect that ended after a disconnect would have made the connection anew.
            self._under_way = self._under_way[0], lambda _: self._disconnect()

    def collect(self) -> None:
        """Apply what a call has come to, if it has ended."""
        if self._under_way is not None and self._under_way[0].done():
            (ended, then), self._under_way = self._under_way, None
            then(ended)
        self._connect_in_turn()

    def look(self) -> None:
        """Ask once more what the transport has refused for now. Once a second."""
        self.collect()
        if self.state is PeerState.LETTING_GO and self._under_way is None:
            self._disconnect()

    def _connect_in_turn(self) -> None:
        if self.state is not PeerState.CONNECTING or self._known_to_transport:
            return
        if self._earlier is not None and self._earlier.state is not PeerState.GONE:
            return
        self._earlier = None
        self._known_to_transport = True
        peer = PeerInfo(self.session_id, self.hello.regions)
        self._begin(partial(self._transport.connect, peer), self._connected)

    def _connected(self, ended: Future[None]) -> None:
        failure = None
        try:
            ended.result()
        except (TransferError, ProtocolError, StartupError) as error:
            failure = str(error)
        answer, self._answer = self._answer, _nothing
        if failure is None:
            self.state = PeerState.CONNECTED
        else:
            self.let_go(_nothing)
        answer(failure)

    def _disconnect(self) -> None:
        self._begin(partial(self._transport.disconnect, self.session_id), self._disconnected)

    def _disconnected(self, ended: Future[None]) -> None:
        try:
            ended.result()
        except TransferError as error:
            logger.error("asked again later: %s", error)
        else:
            self._end()

    def _end(self) -> None:
        self.state = PeerState.GONE
        self._gone()

    def _begin(self, call: Callable[[], T], then: Callable[[Future[T]], None]) -> None:
        future = self._calls.submit(call)
        self._under_way = future, then
        if future.done():
            self.collect()
        else:
            future.add_done_callback(lambda _: self._wake())


def _nothing(*_: object) -> None:
    """For whom nobody waits."""

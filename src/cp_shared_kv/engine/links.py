"""The links of whoever drives a prefill group: the controller, or the replay tool in its place."""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec
import zmq

from cp_shared_kv.engine.codecs import (
    DECODE_TO_CONTROLLER,
    FROM_RANK,
    DecodeToController,
    FromRank,
    encode,
)
from cp_shared_kv.engine.messages import (
    Configure,
    Configured,
    ConnectDecode,
    DecodeConnected,
    RegionMapped,
)
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.errors import CpkvError, ProtocolError, StartupError
from cp_shared_kv.transfer.messages import Hello
from cp_shared_kv.transfer.rendezvous import check_hello

STEP_SECONDS = 120.0
"""How long one step (loading weights, mapping pools, a batch of a replay) may take."""
IDENTITY = b"prefill-0"
RECONNECT_SECONDS = 0.05


def rank_identity(rank: int) -> bytes:
    """What a rank is called on zmq links."""
    return f"rank-{rank}".encode()


class GroupLinks:
    """Sockets to the N ranks and to the decode worker of one run. `close` frees the addresses."""

    def __init__(self, spec: RunSpec) -> None:
        context = zmq.Context.instance()
        self._spec = spec
        self._cp_size = spec.limits.cp_size
        self.ranks = context.socket(zmq.ROUTER)
        self.decode = context.socket(zmq.DEALER)
        self.decode.setsockopt(zmq.IDENTITY, IDENTITY)
        for socket in (self.ranks, self.decode):
            socket.linger = 0
            socket.sndhwm = socket.rcvhwm = 0  # credit is the scheduler's: one batch in flight
        self.ranks.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.ranks.bind(spec.endpoints.ranks)
        self.decode.connect(spec.endpoints.decode)

    def to_ranks(self, message: msgspec.Struct) -> None:
        """Send one message to every rank."""
        data = encode(message)
        for rank in range(self._cp_size):
            try:
                self.ranks.send_multipart([rank_identity(rank), data])
            except zmq.ZMQError as error:
                raise CpkvError(f"rank {rank} is gone: {error}") from error

    def to_decode(self, message: msgspec.Struct) -> None:
        """Send one message to the decode worker."""
        self.decode.send(encode(message))

    def from_rank(self) -> FromRank:
        """The next message of any rank. ProtocolError for one that another process sent."""
        frames = self.ranks.recv_multipart()
        message = FROM_RANK.decode(frames[-1])
        if frames[0] != rank_identity(message.rank):
            raise ProtocolError(
                f"message in the name of rank {message.rank}", value=repr(frames[0][:40])
            )
        return message

    def from_decode(self) -> DecodeToController:
        """The next message of the decode worker."""
        return DECODE_TO_CONTROLLER.decode(self.decode.recv())

    def await_ranks(self, kind: type[FromRank], what: str) -> None:
        """Wait until each rank has sent one message of a kind; others are dropped meanwhile."""
        waiting = set(range(self._cp_size))
        while waiting:
            if not self.ranks.poll(timeout=int(STEP_SECONDS * 1000)):
                raise StartupError(f"ranks {sorted(waiting)} did not {what} in time")
            message = self.from_rank()
            if isinstance(message, kind):
                waiting.discard(message.rank)

    def await_decode(self, kind: type[msgspec.Struct], what: str) -> DecodeToController:
        """Wait for one message of a kind from decode; others are dropped meanwhile."""
        while True:
            if not self.decode.poll(timeout=int(STEP_SECONDS * 1000)):
                raise StartupError(f"the decode worker did not {what} in time")
            message = self.from_decode()
            if isinstance(message, kind):
                return message

    def start_group(self, configure: Configure) -> Hello:
        """Begin an epoch: pools at all ranks, handshake with decode, pools mapped by all.

        Returns decode's greeting. Blocking. Raises `HandshakeError` if the two ends cannot work
        together and `StartupError` if one does not answer.
        """
        self._configure_each_rank(configure)
        self.await_ranks(Configured, "make their pools")
        mine = self._spec.hello(
            role="prefill",
            epoch=configure.epoch,
            session_id=f"{self._spec.run_id}-prefill",
            physical_pages=configure.physical_pages,
        )
        self.to_decode(mine)
        theirs = self.await_decode(Hello, "answer the handshake")
        assert isinstance(theirs, Hello)
        check_hello(mine, theirs)
        self.to_ranks(ConnectDecode(address=self._spec.endpoints.decode, hello=theirs))
        self.await_ranks(DecodeConnected, "map the decode worker's pool")
        self.to_decode(RegionMapped(epoch=configure.epoch))
        return theirs

    def _configure_each_rank(self, configure: Configure) -> None:
        """As `to_ranks`, waiting for ranks that are still connecting (again) to this address."""
        deadline = time.monotonic() + STEP_SECONDS
        waiting = set(range(self._cp_size))
        while waiting:
            for rank in sorted(waiting):
                with suppress(zmq.ZMQError):
                    self.ranks.send_multipart([rank_identity(rank), encode(configure)])
                    waiting.discard(rank)
            if waiting and time.monotonic() > deadline:
                raise StartupError(f"ranks {sorted(waiting)} did not connect in time")
            if waiting:
                time.sleep(RECONNECT_SECONDS)

    def close(self) -> None:
        """Close both links and free the ranks' address for a successor."""
        self.ranks.unbind(self._spec.endpoints.ranks)
        self.ranks.close()
        self.decode.close()

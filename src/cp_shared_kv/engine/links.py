"""The links of whoever drives a prefill group: the controller, or the replay tool in its place."""

from __future__ import annotations

import logging
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
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import Configure, Configured, RankReady
from cp_shared_kv.engine.off_host import is_off_host, secure_client
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.errors import CpkvError, ProtocolError, StartupError
from cp_shared_kv.transfer.messages import Hello
from cp_shared_kv.transfer.rendezvous import read_hello

STEP_SECONDS = 120.0
"""How long one step (mapping pools, a batch of a replay) may take."""
RECONNECT_SECONDS = 0.05

logger = logging.getLogger("cp_shared_kv")


def dealer(
    identity: bytes,
    address: str,
    keys: ControlKeys | None = None,
    *,
    contact_seconds: float | None = None,
) -> zmq.Socket[bytes]:
    """A link to a process's inbox. ProtocolError for an address that is none.

    One on another host needs keys. With `contact_seconds` such a link stands when it is returned;
    ProtocolError if it does not stand in time.
    """
    if is_off_host(address) and keys is None:
        raise ProtocolError(
            "an address on another host, in a run without keys", value=address[:200]
        )
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.linger = 0
    # Credit is the scheduler's, so zmq sets no limit.
    socket.sndhwm = socket.rcvhwm = 0
    if is_off_host(address) and keys is not None:
        secure_client(socket, keys)
        socket.setsockopt(zmq.IMMEDIATE, int(contact_seconds is not None))
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ProtocolError(
            "an address that cannot be connected to", value=address[:200]
        ) from error
    if contact_seconds is not None and not socket.poll(int(contact_seconds * 1000), zmq.POLLOUT):
        socket.close()
        raise ProtocolError(
            f"no connection to the address in {contact_seconds:.0f} s", value=address[:200]
        )
    return socket


def post(socket: zmq.Socket[bytes], message: msgspec.Struct) -> None:
    """Send one message on a dealer's link; does not wait. On a link that is lost it goes nowhere:
    whoever holds the link looks after that (off_host.py)."""
    with suppress(zmq.Again):
        socket.send(encode(message), zmq.NOBLOCK)


class RanksLink:
    """The door for the N ranks of one life of a group. `close` frees the address."""

    def __init__(self, spec: RunSpec, life: Life) -> None:
        self._address = spec.endpoints.inbox(life)
        self._life = life
        self._cp_size = spec.limits.cp_size
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.linger = 0
        # Credit is the scheduler's: one batch in flight.
        self.socket.sndhwm = self.socket.rcvhwm = 0
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(self._address)

    def send(self, message: msgspec.Struct) -> None:
        """Send one message to every rank."""
        data = encode(message)
        for rank in range(self._cp_size):
            try:
                self.socket.send_multipart([self._life.rank_identity(rank), data])
            except zmq.ZMQError as error:
                raise CpkvError(f"rank {rank} is gone: {error}") from error

    def receive(self) -> FromRank:
        """The next message of any rank. ProtocolError for one that another process sent."""
        frames = self.socket.recv_multipart()
        message = FROM_RANK.decode(frames[-1])
        if frames[0] != self._life.rank_identity(message.rank):
            raise ProtocolError(
                f"message in the name of rank {message.rank}", value=repr(frames[0][:40])
            )
        return message

    def wait_until_ready(self) -> None:
        """Wait until each rank has loaded its weights. How long that may take is the supervisor's
        to judge: it ends this process with its ranks."""
        self.wait_for(RankReady, "load their weights", limit_seconds=None)

    def wait_for(
        self, kind: type[FromRank], what: str, limit_seconds: float | None = STEP_SECONDS
    ) -> list[FromRank]:
        """Wait until each rank has sent one message of a kind; others are dropped meanwhile."""
        told: dict[int, FromRank] = {}
        deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
        while len(told) < self._cp_size:
            if not self.socket.poll(_milliseconds_to(deadline)):
                waiting = sorted(set(range(self._cp_size)) - told.keys())
                raise StartupError(f"ranks {waiting} did not {what} in time")
            try:
                message = self.receive()
            except ProtocolError as error:
                logger.error("message refused: %s", error)
                continue
            if isinstance(message, kind):
                told[message.rank] = message
        return [told[rank] for rank in sorted(told)]

    def configure(self, message: Configure) -> None:
        """Begin an epoch: a pool at each rank. Blocking; StartupError if one does not answer."""
        deadline = time.monotonic() + STEP_SECONDS
        waiting = set(range(self._cp_size))
        while waiting:  # ranks may still be connecting (again) to this address
            for rank in sorted(waiting):
                with suppress(zmq.ZMQError):
                    self.socket.send_multipart([self._life.rank_identity(rank), encode(message)])
                    waiting.discard(rank)
            if waiting and time.monotonic() > deadline:
                raise StartupError(f"ranks {sorted(waiting)} did not connect in time")
            if waiting:
                time.sleep(RECONNECT_SECONDS)
        self.wait_for(Configured, "make their pools")

    def close(self) -> None:
        """Free the ranks' address for a successor."""
        self.socket.unbind(self._address)
        self.socket.close()


class DecodeLink:
    """A link to one life of a decode worker, from one life of a prefill group."""

    def __init__(
        self, group: Life, decode: Life, address: str, keys: ControlKeys | None = None
    ) -> None:
        self.decode = decode
        self.address = address
        self.made_seconds = time.monotonic()
        self.socket = dealer(group.identity, address, keys)

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; does not wait. Once closed it goes nowhere: rooms of a worker that is
        lost outlive its link, until the ranks have concluded them."""
        if not self.socket.closed:
            post(self.socket, message)

    def greeting(self, mine: Hello) -> Hello:
        """The next message, which is to be a greeting; blocks until there is one. For what it
        raises see `read_hello`."""
        return read_hello(self.socket.recv(), mine)

    def receive(self) -> DecodeToController:
        """The next message; blocks until there is one."""
        return DECODE_TO_CONTROLLER.decode(self.socket.recv())

    def wait_for(self, kind: type[msgspec.Struct], what: str) -> DecodeToController:
        """Wait for one message of a kind; others are dropped meanwhile."""
        deadline = time.monotonic() + STEP_SECONDS
        while True:
            if not self.socket.poll(_milliseconds_to(deadline)):
                raise StartupError(f"the decode worker did not {what} in time")
            message = self.receive()
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        """Drop the link and what was on its way."""
        self.socket.close()


def _milliseconds_to(deadline: float | None) -> int | None:
    return None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000))

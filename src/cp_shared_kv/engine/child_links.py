"""The supervisor's end of the links to its children: reports in, news of other processes out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq

from cp_shared_kv.engine.child import ChildReport
from cp_shared_kv.engine.codecs import encode
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import ProcessDown, ProcessUp
from cp_shared_kv.engine.run_spec import PRIVATE_MODE
from cp_shared_kv.errors import ProtocolError

logger = logging.getLogger("cp_shared_kv")


class ChildLinks:
    """Listens at `address`, an ipc path that its user alone may open. For one thread."""

    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)
        os.chmod(address.removeprefix("ipc://"), PRIVATE_MODE)

    def receive(self, seconds: float, take: Callable[[bytes, ChildReport], None]) -> None:
        """Hand each report to `take`, with its sender; wait so long for the first. Those that are
        no report, or that `take` raises ProtocolError for, are logged."""
        wait_ms = int(seconds * 1000)
        while self._socket.poll(wait_ms):
            frames = self._socket.recv_multipart()  # a stranger may send any number of them
            identity, data = frames[0], frames[-1]
            wait_ms = 0
            try:
                take(identity, msgspec.msgpack.decode(data, type=ChildReport))
            except (msgspec.MsgspecError, ProtocolError):
                logger.error("report refused from %r", identity[:40])

    def send(self, life: Life, news: ProcessUp | ProcessDown) -> None:
        """Tell a life's main process; one that has gone misses it."""
        with suppress(zmq.ZMQError):  # it has just ended: the next look will find it
            self._socket.send_multipart([life.identity, encode(news)])

    def close(self) -> None:
        """Hear no more. Again: no effect."""
        self._socket.close()

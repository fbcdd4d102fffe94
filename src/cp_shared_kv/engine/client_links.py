"""The links of the engine's client to its prefill groups and decode workers, over zmq."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
import zmq
import zmq.asyncio

from cp_shared_kv.engine.api import EngineRefusal
from cp_shared_kv.engine.codecs import FROM_SERVER, TO_SERVER, FromServer
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.off_host import OffHostDoor
from cp_shared_kv.errors import ProtocolError

logger = logging.getLogger("cp_shared_kv")


class ClientLinks:
    """Processes connect to `address`; those of other hosts where `open_off_host` lets them, if it
    is given. For one event loop."""

    def __init__(
        self, address: str, open_off_host: Callable[[zmq.asyncio.Socket], OffHostDoor] | None
    ) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(address)
        self.off_host_door = None if open_off_host is None else open_off_host(self._socket)

    async def send(self, to: Life, message: FromServer) -> None:
        """EngineRefusal if the life is not connected, or the message is too long to be sent."""
        try:
            await self._socket.send_multipart([to.identity, FROM_SERVER.encode(message)])
        except zmq.ZMQError as error:
            raise EngineRefusal(f"{to.unit} is not connected", kind="unavailable") from error
        except ProtocolError as error:
            raise EngineRefusal(str(error), kind="too_long") from error

    async def receive(self, take: Callable[[Life, msgspec.Struct], Awaitable[None]]) -> None:
        """Hand every message to `take`, with its sender, for ever. Those that are malformed, or
        that `take` raises ProtocolError for, are logged."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                sender = Life.parse(frames[0])
                await take(sender, TO_SERVER.decode(frames[-1]))
            except ProtocolError as error:
                logger.error("message refused: %s", error)

    def close(self) -> None:
        """Hear no more."""
        self._socket.close()
        if self.off_host_door is not None:
            self.off_host_door.close()

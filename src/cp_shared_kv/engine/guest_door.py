"""The socket at which satellites of other hosts join a run."""

from __future__ import annotations

import zmq

from cp_shared_kv.engine.codecs import TO_SATELLITE, ToSatellite
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.off_host import OffHostDoor
from cp_shared_kv.errors import StartupError

LINGER_MILLISECONDS = 1000


class GuestDoor:
    """Implements `guests.Door` over TCP with CURVE. StartupError if the address cannot be had.

    Used by one thread after the other.
    """

    def __init__(self, host: str, port: int, keys: ControlKeys) -> None:
        # A context of its own: each has one authenticator, and a process may hold several runs.
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = LINGER_MILLISECONDS
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self._door = OffHostDoor(self._socket, host, port, keys)
        except StartupError:
            self._socket.close()
            self._context.term()
            raise

    @property
    def address(self) -> str:
        """What a satellite is given: `HOST:PORT`."""
        return self._door.address.removeprefix("tcp://")

    def receive(self, wait_seconds: float = 0.0) -> tuple[bytes, bytes] | None:
        """The next message and the connection that it came on; None if none comes in time."""
        if self._socket.closed or not self._socket.poll(int(wait_seconds * 1000)):
            return None
        frames = self._socket.recv_multipart()
        return frames[0], frames[-1]

    def send(self, satellite: bytes, message: ToSatellite) -> bool:
        """Whether the connection still stands; does not wait."""
        try:
            self._socket.send_multipart([satellite, TO_SATELLITE.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return True  # it does not read: the watchdog's business
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """Let what was sent leave, for a second, and hear no more. Again: no effect."""
        if not self._socket.closed:
            self._socket.close()
            self._door.close()
            self._context.term()

"""Links between hosts: encrypted, for holders of the cluster's keys alone, and never mended.

zmq would connect a broken link again by itself and lose what was on its way, unnoticed. So such a
link is lost when it breaks, once and for all; whoever notices has the life at its end replaced.
"""

from __future__ import annotations

import os
from typing import Any

import zmq

from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.errors import StartupError
from cp_shared_kv.transfer.messages import MAX_MESSAGE_BYTES

DOMAIN = b"cpkv"
CURVE_OVERHEAD_BYTES = 64
"""What encryption adds to a frame, with room to spare."""
HANDSHAKE_SECONDS = 5
"""How long a stranger may take to prove that it is none."""
BACKLOG = 64
"""How many connections may wait to be accepted; a cluster's own are few and are tried again."""
HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT_SECONDS = 3, 15
"""A link without sign of life from the other end's machine for so long is lost."""


def is_off_host(address: str) -> bool:
    """Whether an address of a process is for other hosts (`tcp://`), and not for this one."""
    return address.startswith("tcp://")


def is_lost(socket: zmq.Socket[Any]) -> bool:
    """Whether a link made by `secure_client` has broken: what is sent on it now goes nowhere."""
    return not socket.poll(0, zmq.POLLOUT)


def secure_client(socket: zmq.Socket[Any], keys: ControlKeys) -> None:
    """Prepare a socket to connect to a process on another host, which must hold the same keys."""
    _set_limits(socket)
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.curve_serverkey = keys.public
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret


class OffHostDoor:
    """Lets holders of the keys connect to `socket` from other hosts, at `address`.

    What the socket was bound to before stays as it is. One for each zmq context. `port` 0 takes a
    free one. StartupError if the address cannot be had, with nothing left open.
    """

    def __init__(self, socket: zmq.Socket[Any], host: str, port: int, keys: ControlKeys) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # brings asyncio, which few need

        self._keys = keys
        _set_limits(socket)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        # Without somebody who decides, nobody is let in.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.zap_domain = DOMAIN
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        self._authenticator = ThreadAuthenticator(socket.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN.decode(), self)
        try:
            socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._authenticator.stop()
            raise StartupError(
                f"cannot listen at {host}:{port}: {os.strerror(error.errno or 0)}",
                change="choose another --control-host or --control-port",
            ) from error
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        """Where others connect: `tcp://HOST:PORT`."""

    def callback(self, _domain: str, key: bytes) -> bool:
        """Asked by zmq's authenticator, in its thread: may the holder of this public key in?"""
        return key == self._keys.public

    def close(self) -> None:
        """Decide no more. To call after the socket is closed."""
        self._authenticator.stop()


def _set_limits(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + CURVE_OVERHEAD_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_SECONDS * 1000)

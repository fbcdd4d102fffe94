"""What this process's TCP sockets say about bytes that may still be read from them.

The kernel keeps what a sender wrote before it ended. On one host both ends of a connection can be
seen: the ones of this process by file descriptor, the others in the network namespace's tables.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

_ESTABLISHED, _SYN_RECV, _TIME_WAIT, _CLOSE_WAIT, _LISTEN = 1, 3, 6, 8, 10


def listening_ports() -> frozenset[int]:
    """The ports that sockets of this process listen on."""
    return frozenset(port for port, state in _own_sockets() if state == _LISTEN)


def ended_connections(ports: Collection[int]) -> int:
    """Connections to these ports of this process that a sender has ended, and that are not read
    to their end.

    As long as a connection is established and its sender's process lives, it is that sender who
    says whether bytes are under way.
    """
    here = sum(
        port in ports and state not in (_ESTABLISHED, _LISTEN) for port, state in _own_sockets()
    )
    # A sender that has gone leaves the kernel to deliver what it had written.
    there = sum(
        _port(remote) in ports and state not in (_ESTABLISHED, _TIME_WAIT)
        for _, remote, state in _connections()
    )
    return here + there


def open_connections(ports: Collection[int]) -> frozenset[str]:
    """The connections to these ports, by both ends, on which their sender may yet write or that are
    not read to their end. Those that were not accepted yet are among them.

    A sender of another host that has gone leaves one as it is until its end of file arrives here.
    """
    return frozenset(
        f"{local}-{remote}"
        for local, remote, state in _connections()
        if _port(local) in ports and state in (_ESTABLISHED, _SYN_RECV, _CLOSE_WAIT)
    )


def _own_sockets() -> Iterator[tuple[int, int]]:
    """(local port, TCP state) of each TCP socket of this process, reset ones included."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(entry))
        except OSError:  # closed since it was listed
            continue
        try:
            found = socket.socket(fileno=copy)
        except OSError:  # no socket
            os.close(copy)
            continue
        with found:
            internet = found.family in (socket.AF_INET, socket.AF_INET6)
            if internet and found.type == socket.SOCK_STREAM:
                (state,) = struct.unpack_from(
                    "B", found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
                )
                yield found.getsockname()[1], state


def _connections() -> Iterator[tuple[str, str, int]]:
    """(local end, remote end, TCP state) of each TCP socket in this network namespace."""
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net", table)
        if path.exists():
            for line in path.read_text().splitlines()[1:]:
                fields = line.split()
                yield fields[1], fields[2], int(fields[3], 16)


def _port(end: str) -> int:
    return int(end.rpartition(":")[2], 16)

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

_ESTABLISHED, _TIME_WAIT, _LISTEN = 1, 6, 10


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
        remote_port in ports and state not in (_ESTABLISHED, _TIME_WAIT)
        for remote_port, state in _remote_ends()
    )
    return here + there


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


def _remote_ends() -> Iterator[tuple[int, int]]:
    """(remote port, TCP state) of each TCP connection in this network namespace."""
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net", table)
        if path.exists():
            for line in path.read_text().splitlines()[1:]:
                fields = line.split()
                yield int(fields[2].rpartition(":")[2], 16), int(fields[3], 16)

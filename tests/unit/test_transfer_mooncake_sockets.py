"""What the kernel still holds of what a process wrote that is gone."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from cp_shared_kv.transfer.mooncake_sockets import (
    ended_connections,
    listening_ports,
    open_connections,
)

SENDER = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.setblocking(False)
try:
    for _ in range(int(sys.argv[2])):
        s.send(b"x" * 65536)
except BlockingIOError:
    pass
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def started_sender(listener: socket.socket, chunks: int) -> subprocess.Popen[bytes]:
    port = str(listener.getsockname()[1])
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER, port, str(chunks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert sender.stdout is not None
    assert sender.stdout.readline() == b"written\n"
    return sender


def kill(sender: subprocess.Popen[bytes]) -> None:
    sender.kill()
    sender.communicate(timeout=10)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_port_that_is_listened_on_is_found(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert port in listening_ports()
    listener.close()
    assert port not in listening_ports()


@pytest.mark.parametrize("chunks", [1, 1000], ids=["all of it arrived", "more than fits"])
def test_what_a_killed_sender_wrote_counts_until_it_is_read(
    listener: socket.socket, chunks: int
) -> None:
    ports = {listener.getsockname()[1]}
    sender = started_sender(listener, chunks)
    connection, _ = listener.accept()
    with connection:
        assert not ended_connections(ports)  # it lives: it knows for itself
        kill(sender)
        until(lambda: ended_connections(ports) > 0)
        while connection.recv(1 << 20):
            assert ended_connections(ports)
        assert ended_connections(ports)  # read to its end, but the reader has not closed it yet
    until(lambda: not ended_connections(ports))


def test_what_came_before_a_reset_counts_too(listener: socket.socket) -> None:
    # A sender killed with unread answers resets the connection. The kernel's tables forget it at
    # once; what it wrote can still be read.
    ports = {listener.getsockname()[1]}
    sender = started_sender(listener, 1)
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"an answer that is never read")
        kill(sender)
        until(lambda: ended_connections(ports) > 0)
        with contextlib.suppress(ConnectionResetError):
            connection.recv(1 << 20)
        assert ended_connections(ports)
    until(lambda: not ended_connections(ports))


def test_other_ports_do_not_count(listener: socket.socket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        sender = started_sender(listener, 1)
        connection, _ = listener.accept()
        with connection:
            kill(sender)
            until(lambda: ended_connections({listener.getsockname()[1]}) > 0)
            assert not ended_connections({other.getsockname()[1]})


def test_a_connection_is_open_from_before_it_is_accepted_until_it_is_read_to_its_end(
    listener: socket.socket,
) -> None:
    ports = {listener.getsockname()[1]}
    assert open_connections(ports) == frozenset()
    sender = started_sender(listener, 1)
    (first,) = open_connections(ports)
    connection, _ = listener.accept()
    with connection:
        other = started_sender(listener, 1)
        assert first in open_connections(ports)
        assert len(open_connections(ports)) == 2
        kill(sender)
        while connection.recv(1 << 20):
            assert first in open_connections(ports)
    until(lambda: first not in open_connections(ports))
    assert len(open_connections(ports)) == 1  # the other lives
    kill(other)

"""The TCP entrance of a socket: for holders of the keys and nobody else, whatever they send."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from cp_shared_kv.engine import off_host as module
from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.engine.links import dealer, post
from cp_shared_kv.engine.off_host import OffHostDoor, is_lost
from cp_shared_kv.engine.satellite_messages import StillHere
from cp_shared_kv.errors import ProtocolError, StartupError
from cp_shared_kv.transfer.messages import MAX_MESSAGE_BYTES

HOST = "127.0.0.2"
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"


def new_keys(directory: Path) -> ControlKeys:
    ControlKeys.create(directory)
    return ControlKeys.load(directory)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> ControlKeys:
    return new_keys(tmp_path_factory.mktemp("cluster") / "keys")


class Process:
    """A socket with both entrances."""

    def __init__(self, keys: ControlKeys, directory: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.local = f"ipc://{directory}/inbox.sock"
        self.socket.bind(self.local)
        self.door = OffHostDoor(self.socket, HOST, 0, keys)

    @property
    def port(self) -> int:
        return int(self.door.address.rpartition(":")[2])

    def heard(self, seconds: float = 5.0) -> bytes | None:
        """Who was heard; None if nobody was in that time."""
        return self.socket.recv_multipart()[0] if self.socket.poll(int(seconds * 1000)) else None

    def close(self) -> None:
        self.socket.close()
        self.door.close()
        self.context.term()


@pytest.fixture
def process(keys: ControlKeys, tmp_path: Path) -> Iterator[Process]:
    made = Process(keys, tmp_path)
    yield made
    made.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def assert_only_holders_are_heard(process: Process, keys: ControlKeys) -> None:
    """Nobody has been heard until now, and a holder of the keys is."""
    link = dealer(b"holder", process.door.address, keys)
    post(link, StillHere())
    assert process.heard() == b"holder"
    link.close()


def test_a_holder_of_the_keys_is_heard_and_so_is_this_host(
    process: Process, keys: ControlKeys
) -> None:
    near, far = dealer(b"near", process.local), dealer(b"far", process.door.address, keys)
    for link, name in ((near, b"near"), (far, b"far")):
        post(link, StillHere())
        assert process.heard() == name
        process.socket.send_multipart([name, b"answer"])
        assert link.recv() == b"answer"
        link.close()


def test_other_keys_are_not_heard(process: Process, keys: ControlKeys, tmp_path: Path) -> None:
    stranger = dealer(b"stranger", process.door.address, new_keys(tmp_path / "other"))
    post(stranger, StillHere())
    until(lambda: is_lost(stranger))
    assert_only_holders_are_heard(process, keys)
    stranger.close()


def test_whoever_knows_the_public_half_alone_is_not_heard(
    process: Process, keys: ControlKeys
) -> None:
    public, secret = zmq.curve_keypair()
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.linger = 0
    stranger.setsockopt(zmq.RECONNECT_IVL, -1)
    stranger.curve_serverkey = keys.public
    stranger.curve_publickey, stranger.curve_secretkey = public, secret
    stranger.connect(process.door.address)
    # The door may have closed by now, and then a send would wait for ever.
    with suppress(zmq.Again):
        stranger.send(b"let me in", zmq.NOBLOCK)
    until(lambda: is_lost(stranger))
    assert_only_holders_are_heard(process, keys)
    stranger.close()


def test_no_keys_are_not_heard(process: Process, keys: ControlKeys) -> None:
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.linger = 0
    stranger.connect(process.door.address)
    stranger.send(b"let me in")
    assert process.heard(0.5) is None
    assert_only_holders_are_heard(process, keys)
    stranger.close()


def test_nobody_is_heard_once_nobody_decides(process: Process, keys: ControlKeys) -> None:
    process.door.close()
    link = dealer(b"holder", process.door.address, keys)
    post(link, StillHere())
    assert process.heard(0.5) is None
    link.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(4096),
        bytes(4096),
        b"\x01\x00\x06secret" * 10,  # ZMTP 1.0, which knows no keys
        b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x06secret",  # ZMTP 2.0
        ZMTP_GREETING + b"NULL".ljust(20, b"\0") + bytes(32),
        ZMTP_GREETING + b"PLAIN".ljust(20, b"\0") + bytes(32),
        ZMTP_GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8" + bytes(200),
    ],
    ids=["http", "noise", "zeros", "zmtp 1", "zmtp 2", "null", "plain", "empty hello"],
)
def test_garbage_is_not_heard_and_harms_nobody(
    process: Process, keys: ControlKeys, data: bytes
) -> None:
    link = dealer(b"before", process.door.address, keys)
    post(link, StillHere())
    assert process.heard() == b"before"
    with socket.create_connection((HOST, process.port)) as stranger:
        stranger.sendall(data)
        assert_only_holders_are_heard(process, keys)
    assert not is_lost(link)
    link.close()


def test_a_stranger_that_says_nothing_is_dropped(
    keys: ControlKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 1)
    process = Process(keys, tmp_path)
    with socket.create_connection((HOST, process.port)) as stranger:
        stranger.settimeout(10)
        with suppress(ConnectionResetError):
            while stranger.recv(1 << 16):
                pass  # its greeting; TimeoutError if the end does not come
    assert_only_holders_are_heard(process, keys)
    process.close()


def test_a_huge_frame_of_a_stranger_is_cut_off_at_its_announcement(
    process: Process, keys: ControlKeys
) -> None:
    greeting = ZMTP_GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
    with socket.create_connection((HOST, process.port)) as stranger:
        stranger.settimeout(10)
        stranger.sendall(greeting + b"\x06" + struct.pack(">Q", 1 << 33))
        answer = b""
        try:
            while chunk := stranger.recv(1 << 16):
                answer += chunk
        except ConnectionResetError:
            pass
        assert len(answer) <= 64  # its own greeting, and then the end
    assert_only_holders_are_heard(process, keys)


def test_a_huge_frame_of_a_holder_is_cut_off_too(process: Process, keys: ControlKeys) -> None:
    link = dealer(b"broken", process.door.address, keys)
    link.send(bytes(MAX_MESSAGE_BYTES + 1000))
    until(lambda: is_lost(link))
    assert_only_holders_are_heard(process, keys)
    link.close()


def test_the_largest_message_gets_through(process: Process, keys: ControlKeys) -> None:
    link = dealer(b"large", process.door.address, keys)
    link.send(bytes(MAX_MESSAGE_BYTES))
    assert process.heard(20) == b"large"
    link.close()


def test_a_link_that_breaks_stays_lost_and_sending_on_it_does_not_wait(
    keys: ControlKeys, tmp_path: Path
) -> None:
    process = Process(keys, tmp_path)
    link = dealer(b"link", process.door.address, keys, contact_seconds=5)
    assert not is_lost(link)
    port = process.port
    process.close()
    until(lambda: is_lost(link))
    post(link, StillHere())
    again = Process(keys, tmp_path)
    again.socket.bind(f"tcp://{HOST}:{port}")
    assert again.heard(1.0) is None
    assert is_lost(link)
    link.close()
    again.close()


def test_a_link_that_is_to_stand_and_does_not_is_an_error(
    process: Process, keys: ControlKeys, tmp_path: Path
) -> None:
    with socket.create_server((HOST, 0)) as silent:
        address = f"tcp://{HOST}:{silent.getsockname()[1]}"
        with pytest.raises(ProtocolError, match="no connection"):
            dealer(b"me", address, keys, contact_seconds=0.3)
    with pytest.raises(ProtocolError, match="no connection"):
        dealer(b"me", process.door.address, new_keys(tmp_path / "other"), contact_seconds=0.3)


def test_another_host_is_not_talked_to_without_keys(process: Process) -> None:
    with pytest.raises(ProtocolError, match="in a run without keys"):
        dealer(b"me", process.door.address)


def test_an_address_that_is_taken_is_named(process: Process, keys: ControlKeys) -> None:
    context = zmq.Context()
    second = context.socket(zmq.ROUTER)
    with pytest.raises(StartupError, match=rf"{HOST}:{process.port}.*in use"):
        OffHostDoor(second, HOST, process.port, keys)
    second.close()
    context.term()

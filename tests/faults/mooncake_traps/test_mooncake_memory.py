"""Which memory can be reached, by whom, and until when."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.testing.transport_ends import TransportEnds, outcome
from cp_shared_kv.transfer.mooncake import MooncakeEngine
from cp_shared_kv.transfer.mooncake_target import MooncakeTarget

from .two_ends import LARGE, RANGE_BYTES, SMALL, ended, endpoint


def test_the_engine_sends_memory_that_nobody_registered(small: TransportEnds) -> None:
    peer = small.peer()
    engine, source = MooncakeEngine("127.0.0.1"), np.full(8, 9, dtype=np.uint8)
    remote = peer.info.regions[0].address
    assert ended(engine.write(endpoint(peer), source.ctypes.data, remote, 8))
    assert peer.memory[:9].tolist() == [9] * 8 + [0]


def test_a_senders_memory_cannot_be_reached_from_outside(small: TransportEnds) -> None:
    peer = small.peer()
    lane = small.transport._lanes[peer.info.session_id]
    engine, found = MooncakeEngine("127.0.0.1"), np.zeros(8, dtype=np.uint8)
    for address in (small.source.ctypes.data, lane._life.ctypes.data):
        assert not ended(engine.read(lane._engine.endpoint, found.ctypes.data, address, 8))


def test_memory_is_exposed_once_and_by_an_open_target() -> None:
    target = MooncakeTarget("cpkv-test-target")
    pool = PrivateBuffer(SMALL)
    region = target.expose(pool)
    assert target.regions[0] == region
    assert region.address == pool.tensor.data_ptr()
    with pytest.raises(TransferError, match="exposed already"):
        target.expose(pool)
    target.close()
    target.close()
    with pytest.raises(TransferError, match="closed"):
        target.expose(PrivateBuffer(SMALL))


def test_a_target_has_not_settled_while_a_dead_senders_bytes_are_unread() -> None:
    target = MooncakeTarget("cpkv-test-target")
    assert target.settled()
    sender = (
        "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1]))).send(b'x')"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # The engine reads at once what comes to its own ports: this one stands in for them.
        port = listener.getsockname()[1]
        target._ports |= {port}
        subprocess.run([sys.executable, "-c", sender, str(port)], check=True, timeout=30)
        connection, _ = listener.accept()
        assert not target.settled()
        connection.close()
        assert target.settled()
    target.close()


def test_nothing_lands_in_a_target_that_has_closed(large: TransportEnds) -> None:
    peer = large.peer()
    future = large.transport.write(peer.info.session_id, large.all_of_it(peer, RANGE_BYTES))
    while not peer.memory[::4096].any():
        time.sleep(0.001)
    peer.ask("close")
    landed = peer.memory.copy()
    error = outcome(future)
    assert error == LARGE or (
        isinstance(error, TransferError) and (error.kind, error.quiescent) == ("unreachable", True)
    )
    time.sleep(0.2)
    np.testing.assert_array_equal(peer.memory, landed)

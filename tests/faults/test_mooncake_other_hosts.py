"""Receivers of another host: what cannot be known there is not claimed.

127.0.0.2 stands for the other host: it is one for the transport, since it is not 127.0.0.1.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec
import numpy as np
import pytest

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo, Runs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mooncake") is None,
    reason="mooncake-transfer-engine-non-cuda has no wheel for this Python",
)

NBYTES = 256 << 20
"""More than the kernel's queues hold."""
RECEIVER = """
import sys, msgspec
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.transfer.mooncake_target import MooncakeTarget
target, pool = MooncakeTarget("cpkv-test-elsewhere", "127.0.0.2"), PrivateBuffer(int(sys.argv[1]))
target.expose(pool)
print(msgspec.json.encode([target.session_id, target.regions]).decode(), flush=True)
sys.stdin.read()
"""


class Receiver:
    """A process with a target that is reached at 127.0.0.2."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RECEIVER, str(NBYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        session_id, regions = msgspec.json.decode(
            self.process.stdout.readline(), type=tuple[str, tuple[Region, ...]]
        )
        self.info = PeerInfo(session_id, regions)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    started = Receiver()
    yield started
    started.end()


def outcome(future: Future[int]) -> int | BaseException | None:
    error = future.exception(timeout=30)
    return future.result() if error is None else error


def test_a_write_that_fails_on_its_way_is_in_doubt_for_good(receiver: Receiver) -> None:
    from cp_shared_kv.transfer.mooncake_transport import MooncakeTransport

    transport, pool = MooncakeTransport("rank-0", other_hosts=True), PrivateBuffer(NBYTES)
    local, peer = transport.register(pool).name, receiver.info.session_id
    transport.connect(receiver.info)

    def write(nbytes: int) -> Future[int]:
        start, length = np.zeros(1, dtype=np.int64), np.array([nbytes], dtype=np.int64)
        return transport.write(
            peer, Runs(local, receiver.info.regions[0].name, start, start, length)
        )

    assert outcome(write(64)) == 64
    under_way, behind = write(NBYTES), write(64)
    lane = transport._lanes[peer]
    while not (lane._current is not None and lane._current.submitted):
        assert not under_way.done()
    receiver.process.send_signal(signal.SIGSTOP)
    assert not under_way.done()
    receiver.process.send_signal(signal.SIGKILL)
    error = outcome(under_way)
    assert isinstance(error, TransferError)
    assert not error.quiescent
    never_begun = outcome(behind)
    assert isinstance(never_begun, TransferError)
    assert never_begun.quiescent
    for _ in range(3):
        assert not transport.revive(peer)
        refused = outcome(write(64))
        assert isinstance(refused, TransferError)
        assert (refused.kind, refused.quiescent) == ("unreachable", True)
    transport.disconnect(peer)  # its process is dead
    transport.close()


def test_a_stopped_receiver_that_counts_as_dead_holds_nobody_up(receiver: Receiver) -> None:
    from cp_shared_kv.transfer.mooncake_transport import MooncakeTransport

    transport, pool = MooncakeTransport("rank-0", other_hosts=True), PrivateBuffer(NBYTES)
    local, peer = transport.register(pool).name, receiver.info.session_id
    transport.connect(receiver.info)
    receiver.process.send_signal(signal.SIGSTOP)
    start, length = np.zeros(1, dtype=np.int64), np.array([NBYTES], dtype=np.int64)
    transport.write(peer, Runs(local, receiver.info.regions[0].name, start, start, length))
    time.sleep(0.2)
    before = time.monotonic()
    transport.disconnect(peer)
    assert time.monotonic() - before < 5.0
    receiver.end()

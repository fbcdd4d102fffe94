"""Each trap of Mooncake's Transfer Engine, on the real one, and that the transport closes it.

A test whose name begins with "the engine" shows that a trap is there: if it fails, a later release
has closed it, and the transport may need less.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cp_shared_kv.errors import StartupError, TransferError
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.testing.transport_ends import (
    STALL_SECONDS,
    TransportEnds,
    outcome,
    revived,
    stopped_in_mid_write,
)
from cp_shared_kv.testing.transport_peer import PeerError, TransportPeer
from cp_shared_kv.transfer.mooncake import MooncakeEngine, Transfer
from cp_shared_kv.transfer.mooncake_target import MooncakeTarget
from cp_shared_kv.transfer.mooncake_transport import MooncakeTransport
from cp_shared_kv.transfer.transport import KVTransport, PeerInfo

SMALL, LARGE = 1 << 16, 64 << 20
RANGE_BYTES = 256 << 10
LIMIT_SECONDS = 30.0


@pytest.fixture(scope="module", autouse=True)
def wheel() -> None:
    """Skips where the wheel cannot be loaded, and says why."""
    try:
        MooncakeEngine("127.0.0.1")
    except StartupError as error:
        pytest.skip(str(error))


@pytest.fixture
def small() -> Iterator[TransportEnds]:
    with TransportEnds("mooncake", SMALL) as ends:
        yield ends


@pytest.fixture
def large() -> Iterator[TransportEnds]:
    with TransportEnds("mooncake", LARGE) as ends:
        yield ends


def endpoint(peer: TransportPeer) -> str:
    return peer.info.session_id.partition("@")[2]


def ended(transfer: Transfer | None) -> bool:
    assert transfer is not None
    deadline = time.monotonic() + LIMIT_SECONDS
    while (landed := transfer.landed()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return landed


# The queue --------------------------------------------------------------------------------------


def test_the_engine_fails_what_it_cannot_queue_while_the_rest_goes_on(small: TransportEnds) -> None:
    peer = small.peer()
    engine, source = MooncakeEngine("127.0.0.1"), np.ones(SMALL, dtype=np.uint8)
    remote = peer.info.regions[0].address
    assert ended(engine.write(endpoint(peer), source.ctypes.data, remote, 8))
    peer.stop()
    transfers = [
        engine.write(endpoint(peer), source.ctypes.data, remote, SMALL) for _ in range(2500)
    ]
    time.sleep(1.5)  # as long as the engine keeps what it has no room for, and half a second
    found = [transfer.landed() for transfer in transfers if transfer is not None]
    peer.resume()
    assert found.count(False) > 500
    assert found.count(None) > 500


def test_more_ranges_than_the_queue_holds_wait_their_turn(small: TransportEnds) -> None:
    peer = small.peer()
    offsets = np.arange(0, SMALL, 16)
    runs = small.runs(peer, offsets, offsets, np.full(len(offsets), 16))
    assert runs.count > 2 * 1024
    futures = [small.transport.write(peer.info.session_id, runs) for _ in range(5)]
    time.sleep(0.02)
    peer.stop()
    time.sleep(1.3)  # longer than the engine's limit on admission, shorter than a stall
    peer.resume()
    assert [future.result(LIMIT_SECONDS) for future in futures] == [SMALL] * 5
    np.testing.assert_array_equal(peer.memory, small.source)


# Time -------------------------------------------------------------------------------------------


def test_a_time_out_is_not_the_end_of_a_write(large: TransportEnds) -> None:
    peer = large.peer()
    session_id = peer.info.session_id
    runs = large.all_of_it(peer, RANGE_BYTES)
    error = stopped_in_mid_write(large.transport, peer, runs)
    assert (error.kind, error.peer, error.quiescent) == ("stalled", session_id, False)
    # Neither memory may be used for anything else, and nothing is added to what may land.
    with pytest.raises(TransferError) as refused:
        large.transport.unregister(large.region)
    assert (refused.value.kind, refused.value.quiescent) == ("in_use", False)
    assert not large.transport.revive(session_id)
    second = large.failure(peer, large.runs(peer, 0, 0, 8))
    assert (second.kind, second.quiescent) == ("unreachable", True)
    before = np.count_nonzero(peer.memory)
    peer.resume()
    revived(large.transport, peer)
    after = np.count_nonzero(peer.memory)
    assert after > before, "nothing was under way: the test has shown nothing"
    large.transport.unregister(large.region)
    time.sleep(0.3)
    assert np.count_nonzero(peer.memory) == after


def test_a_peer_that_stays_stopped_cannot_be_disconnected(large: TransportEnds) -> None:
    transport = MooncakeTransport(
        "impatient", stall_seconds=1.0, contact_seconds=5.0, drain_seconds=0.5
    )
    peer = large.start_peer()
    session_id = peer.info.session_id
    transport.connect(peer.info)
    source = PrivateBuffer(LARGE)
    local = transport.register(source)
    runs = replace(large.all_of_it(peer, RANGE_BYTES), local_region=local.name)
    peer.stop()  # before the write: then its proof of life does not come
    early = outcome(transport.write(session_id, runs))
    assert isinstance(early, TransferError)
    assert (early.kind, early.quiescent) == ("unreachable", True)
    transport.unregister(local)  # nothing was sent, so nothing holds the source
    peer.resume()
    revived(transport, peer)
    local = transport.register(source)
    runs = replace(runs, local_region=local.name)
    source.tensor.fill_(1)
    assert stopped_in_mid_write(transport, peer, runs).kind == "stalled"
    for leave in (lambda: transport.disconnect(session_id), transport.close):
        with pytest.raises(TransferError) as refused:
            leave()
        assert (refused.value.kind, refused.value.quiescent) == ("in_use", False)
    peer.resume()
    deadline = time.monotonic() + LIMIT_SECONDS
    while not closed(transport):
        assert time.monotonic() < deadline


def closed(transport: KVTransport) -> bool:
    """It has nothing under way any more."""
    try:
        transport.close()
    except TransferError:
        return False
    return True


def test_a_peer_that_is_stopped_at_first_contact_is_waited_for_by_nobody_else(
    large: TransportEnds,
) -> None:
    stopped, healthy = large.start_peer(), large.peer()
    stopped.stop()
    began = time.monotonic()
    with pytest.raises(TransferError) as refused:
        large.transport.connect(stopped.info)
    assert (refused.value.kind, refused.value.quiescent) == ("unreachable", True)
    assert large.write(healthy, large.all_of_it(healthy, RANGE_BYTES)) == LARGE
    newcomer = large.peer()
    assert large.write(newcomer, large.runs(newcomer, 0, 0, 8)) == 8
    large.transport.disconnect(stopped.info.session_id)
    assert time.monotonic() - began < 40  # the engine itself waits for 60 s


# Who it is --------------------------------------------------------------------------------------


def test_the_engine_writes_to_whoever_has_the_endpoint_now(small: TransportEnds) -> None:
    peer = small.peer()
    peer.ask("become_another_life")
    engine, source = MooncakeEngine("127.0.0.1"), np.ones(8, dtype=np.uint8)
    remote = peer.info.regions[0].address
    assert ended(engine.write(endpoint(peer), source.ctypes.data, remote, 8))


def test_another_life_at_the_endpoint_is_not_written_to(small: TransportEnds) -> None:
    peer = small.peer()
    peer.ask("become_another_life")
    error = small.failure(peer, small.runs(peer, 0, 0, SMALL))
    assert (error.kind, error.quiescent) == ("unreachable", True)
    assert not small.transport.revive(peer.info.session_id)
    assert not peer.memory.any()


def test_an_earlier_life_is_not_found_at_a_later_one(small: TransportEnds) -> None:
    later = small.start_peer()
    name = "cpkv-test-earlier"
    *pools, life = later.info.regions
    claimed = PeerInfo(
        f"{name}@{endpoint(later)}", (*pools, msgspec.structs.replace(life, name=f"{name}.life"))
    )
    with pytest.raises(TransferError, match="not the one connected"):
        small.transport.connect(claimed)
    small.transport.disconnect(claimed.session_id)
    small.transport.connect(later.info)
    assert small.write(later, small.runs(later, 0, 0, 8)) == 8


def test_a_range_that_the_peer_has_not_exposed_is_refused_by_it(small: TransportEnds) -> None:
    peer = small.start_peer()
    pool, life = peer.info.regions
    liar = PeerInfo(peer.info.session_id, (msgspec.structs.replace(pool, nbytes=2 * SMALL), life))
    small.transport.connect(liar)
    runs = small.runs(peer, [0, 0], [0, SMALL], [8, 8])
    error = outcome(small.transport.write(peer.info.session_id, runs))
    assert isinstance(error, TransferError)
    assert (error.kind, error.quiescent) == ("refused", True)
    assert small.write(peer, small.runs(peer, 0, 0, SMALL)) == SMALL  # and it lives on


# Memory -----------------------------------------------------------------------------------------


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


# Processes --------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys, time
import numpy as np
from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.transfer.mooncake_target import MooncakeTarget
from cp_shared_kv.transfer.mooncake_transport import MooncakeTransport
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo, Runs

session_id, regions = json.loads(sys.argv[1])
transport = MooncakeTransport("sender", stall_seconds=1.0, contact_seconds=5.0)
pool = Region(**regions[0])
local = transport.register(PrivateBuffer(pool.nbytes))
transport.connect(PeerInfo(session_id, tuple(Region(**region) for region in regions)))
offsets = np.arange(0, pool.nbytes, 1 << 18, dtype=np.int64)
runs = Runs(local.name, pool.name, offsets, offsets, np.full(len(offsets), 1 << 18))
"""
FORK = """
target = MooncakeTarget("cpkv-test-fork")
own = target.expose(PrivateBuffer(1 << 20))
transport.connect(PeerInfo(target.session_id, target.regions))
offsets = np.arange(0, own.nbytes, 1 << 12, dtype=np.int64)
runs = Runs(local.name, own.name, offsets, offsets, np.full(len(offsets), 1 << 12))
writes = [transport.write(target.session_id, runs) for _ in range(1000)]
for _ in range(8):
    # Engines at both ends are at work: their threads are in the middle of something.
    assert not writes[-1].done()
    pid = os.fork()
    if pid == 0:
        error = transport.write(target.session_id, runs).exception()
        assert error.kind == "forked" and error.quiescent, error
        for leave in (lambda: transport.disconnect(target.session_id), transport.close):
            try:
                leave()
            except TransferError as error:
                assert error.kind == "forked", error
        target.close()
        os._exit(7)
    deadline = time.monotonic() + 15
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        assert time.monotonic() < deadline, "the child hangs"
        time.sleep(0.001)
    assert os.waitstatus_to_exitcode(ended[1]) == 7, ended
transport.disconnect(target.session_id)
pid = os.fork()
if pid == 0:
    del transport, target
    sys.exit(7)  # with all that the interpreter does at its end
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
transport.connect(PeerInfo(target.session_id, target.regions))
assert transport.write(target.session_id, runs).result(15) == own.nbytes
"""
EXIT = """
offsets = np.arange(0, pool.nbytes, 1 << 12, dtype=np.int64)
runs = Runs(local.name, pool.name, offsets, offsets, np.full(len(offsets), 1 << 12))
for _ in range(20):
    transport.write(session_id, runs)
time.sleep(0.1)
print("writing", flush=True)
sys.exit(3)
"""


def run_script(peer: TransportPeer, ending: str) -> subprocess.CompletedProcess[str]:
    hello = msgspec.json.encode([peer.info.session_id, peer.info.regions]).decode()
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + ending, hello],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_forked_child_is_told_so_and_ends(large: TransportEnds) -> None:
    done = run_script(large.start_peer(), FORK)
    assert done.returncode == 0, done.stderr


def test_a_process_may_end_with_writes_under_way(large: TransportEnds) -> None:
    peer = large.start_peer()
    for _ in range(3):
        done = run_script(peer, EXIT)
        assert (done.returncode, done.stdout) == (3, "writing\n"), done.stderr


# Longer than the engine's limits ----------------------------------------------------------------


@pytest.mark.soak
def test_a_peer_that_is_started_again_on_the_very_port_is_another(small: TransportEnds) -> None:
    ports = {"MC_MIN_RPC_PORT": "14800", "MC_MAX_RPC_PORT": "14801"}
    earlier = small.peers.start("mooncake", SMALL, ports)
    small.transport.connect(earlier.info)
    assert small.write(earlier, small.runs(earlier, 0, 0, 8)) == 8
    earlier.remove()
    # The kernel keeps the port for a minute, and the engine takes either of the two.
    deadline = time.monotonic() + 150
    later = None
    while later is None or endpoint(later) != endpoint(earlier):
        assert time.monotonic() < deadline
        if later is not None:
            later.remove()
        with contextlib.suppress(PeerError):
            later = small.peers.start("mooncake", SMALL, ports)
        time.sleep(1)
    error = small.failure(earlier, small.runs(earlier, 0, 0, SMALL))
    assert (error.kind, error.quiescent) == ("unreachable", True)
    assert not small.transport.revive(earlier.info.session_id)
    assert not later.memory.any()
    small.transport.disconnect(earlier.info.session_id)
    small.transport.connect(later.info)
    assert small.write(later, small.runs(later, 0, 0, SMALL)) == SMALL


@pytest.mark.soak
def test_no_limit_of_the_engine_ends_a_write(large: TransportEnds) -> None:
    peer = large.peer()
    runs = large.all_of_it(peer, RANGE_BYTES)
    assert stopped_in_mid_write(large.transport, peer, runs).kind == "stalled"
    time.sleep(65 - STALL_SECONDS)
    assert not large.transport.revive(peer.info.session_id)
    peer.resume()
    revived(large.transport, peer)
    assert large.write(peer, large.all_of_it(peer, RANGE_BYTES)) == LARGE

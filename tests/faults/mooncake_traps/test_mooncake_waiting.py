"""The engine's queue and its limits of time: what waits, what fails, and what may still land."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.testing.transport_ends import (
    STALL_SECONDS,
    TransportEnds,
    outcome,
    revived,
    stopped_in_mid_write,
)
from cp_shared_kv.transfer.mooncake import MooncakeEngine
from cp_shared_kv.transfer.mooncake_transport import MooncakeTransport
from cp_shared_kv.transfer.transport import KVTransport

from .two_ends import LARGE, LIMIT_SECONDS, RANGE_BYTES, SMALL, ended, endpoint


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

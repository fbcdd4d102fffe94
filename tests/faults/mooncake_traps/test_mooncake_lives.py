"""Who is at an endpoint: another life of a peer, or one that claims what it has not exposed."""

from __future__ import annotations

import contextlib
import time

import msgspec
import numpy as np
import pytest

from cp_shared_kv.errors import TransferError
from cp_shared_kv.testing.transport_ends import TransportEnds, outcome
from cp_shared_kv.testing.transport_peer import PeerError
from cp_shared_kv.transfer.mooncake import MooncakeEngine
from cp_shared_kv.transfer.transport import PeerInfo

from .two_ends import SMALL, ended, endpoint


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

"""Sizes of a write from this process to a peer, and how the bare engine tells its end."""

from __future__ import annotations

import time

from cp_shared_kv.testing.transport_peer import TransportPeer
from cp_shared_kv.transfer.mooncake import Transfer

SMALL, LARGE = 1 << 16, 64 << 20
RANGE_BYTES = 256 << 10
LIMIT_SECONDS = 30.0


def endpoint(peer: TransportPeer) -> str:
    return peer.info.session_id.partition("@")[2]


def ended(transfer: Transfer | None) -> bool:
    assert transfer is not None
    deadline = time.monotonic() + LIMIT_SECONDS
    while (landed := transfer.landed()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return landed

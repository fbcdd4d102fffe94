"""The way to one Mooncake peer, with an engine that fails as it is told; no wheel is needed."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from cp_shared_kv.errors import TransferError
from cp_shared_kv.transfer.mooncake_lane import MooncakeLane
from cp_shared_kv.transfer.mooncake_session import MooncakePeer, life_region, proof_of_life
from cp_shared_kv.transfer.mooncake_write import MooncakeWrite
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo


class Ended:
    """A transfer that has ended."""

    def __init__(self, landed: bool) -> None:
        self._landed = landed

    def landed(self) -> bool:
        return self._landed


class FakeEngine:
    """An engine with so many cut connections, and writes that land or do not."""

    def __init__(
        self, proof: np.ndarray[Any, Any], cut_connections: int, writes_land: bool
    ) -> None:
        self._proof = proof
        self._cut_connections = cut_connections
        self._writes_land = writes_land

    def read(self, peer: str, local: int, remote: int, nbytes: int) -> Ended:
        if self._cut_connections:
            self._cut_connections -= 1
            return Ended(False)
        ctypes.memmove(local, self._proof.ctypes.data, nbytes)
        return Ended(True)

    def write(self, peer: str, local: int, remote: int, nbytes: int) -> Ended:
        return Ended(self._writes_land)


def lane(host: str, *, cut_connections: int = 0, writes_land: bool = True) -> MooncakeLane:
    session_id = f"decode-1@{host}:15001"
    regions = (Region("pool", 4096, 1 << 40), life_region("decode-1", 1 << 41))
    peer = MooncakePeer.of(PeerInfo(session_id, regions), other_hosts=True)
    engine: Any = FakeEngine(proof_of_life(session_id), cut_connections, writes_land)
    return MooncakeLane(peer, engine, 30.0, lambda _engine: None)


def write() -> MooncakeWrite:
    one = np.zeros(1, dtype=np.int64)
    return MooncakeWrite(torch.zeros(64, dtype=torch.uint8), one, one + (1 << 40), one + 64)


def test_a_network_may_have_cut_every_connection_that_the_engine_keeps() -> None:
    lane("192.0.2.7", cut_connections=4).find(5.0)
    with pytest.raises(TransferError, match="does not answer"):
        lane("192.0.2.7", cut_connections=5).find(5.0)
    with pytest.raises(TransferError, match="does not answer"):
        lane("127.0.0.1", cut_connections=2).find(5.0)  # on this host a peer that lives answers


@pytest.mark.parametrize(("host", "doubtful"), [("192.0.2.7", True), ("127.0.0.1", False)])
def test_a_write_that_fails_is_in_doubt_for_good_elsewhere_and_never_on_this_host(
    host: str, doubtful: bool
) -> None:
    made = lane(host, writes_land=False)
    made.find(5.0)
    failed = write()
    made.put(failed)
    error = failed.future.exception(timeout=5)
    assert isinstance(error, TransferError)
    assert error.quiescent is not doubtful
    if doubtful:
        with pytest.raises(TransferError, match="refused a range"):
            made.find(5.0)
        with pytest.raises(TransferError, match="unreachable"):
            made.put(write())
    else:
        made.find(5.0)
        made.put(write())


def test_a_write_that_lands_is_in_no_doubt() -> None:
    made = lane("192.0.2.7")
    made.find(5.0)
    for _ in range(2):
        landed = write()
        made.put(landed)
        assert landed.future.result(timeout=5) == 64

"""A rank goes on while decode workers are stopped, over Mooncake, which waits for them longest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from cp_shared_kv.engine.side_calls import ThreadEach
from cp_shared_kv.engine.transfer_peer import TransferPeer
from cp_shared_kv.engine.transfer_peers import TransferPeers
from cp_shared_kv.errors import StartupError
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.testing.transport_ends import TransportEnds, stopped_in_mid_write
from cp_shared_kv.testing.transport_peer import TransportPeer
from cp_shared_kv.transfer.messages import Hello
from cp_shared_kv.transfer.mooncake import MooncakeEngine
from cp_shared_kv.transfer.mooncake_transport import MooncakeTransport

LARGE, RANGE_BYTES = 64 << 20, 256 << 10
LIMIT_SECONDS = 60.0
SPEC = KVPoolSpec(
    latent_format("fp32", kv_lora_rank=4, qk_rope_head_dim=2, page_size=4),
    index_format("fp32", index_head_dim=2, page_size=4),
    num_layers=1,
    index_layers=(0,),
)
POOL = KVPool(SPEC, 8, PrivateBuffer(SPEC.pool_bytes(8)))


@pytest.fixture(scope="module", autouse=True)
def wheel() -> None:
    """Skips where the wheel cannot be loaded, and says why."""
    try:
        MooncakeEngine("127.0.0.1")
    except StartupError as error:
        pytest.skip(str(error))


@pytest.fixture
def ends() -> Iterator[TransportEnds]:
    with TransportEnds("mooncake", LARGE) as ends:
        yield ends


class Rank:
    """What a rank has of decode workers, and its loop."""

    def __init__(self, transport: MooncakeTransport) -> None:
        self._woken = threading.Event()
        self.peers = TransferPeers(transport, ThreadEach(), self._woken.set)
        self.answers: dict[str, str | None] = {}

    def connect(self, worker: TransportPeer) -> TransferPeer:
        name = worker.info.session_id
        self.peers.connect(
            hello(worker), POOL, lambda failure: self.answers.update({name: failure})
        )
        peer = self.peers.of_epoch(worker.pid)
        assert peer is not None
        return peer

    def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not holds():
            assert time.monotonic() < deadline
            self._woken.wait(0.1)
            self._woken.clear()
            self.peers.look()


def hello(worker: TransportPeer) -> Hello:
    return Hello(
        epoch=worker.pid,
        role="decode",
        session_id=worker.info.session_id,
        transport="mooncake",
        cp_size=1,
        page_size=4,
        latent_format="l",
        index_format="i",
        num_layers=1,
        index_layers=(0,),
        bytes_per_page=SPEC.bytes_per_page,
        model_fingerprint="m",
        physical_pages=8,
        regions=worker.info.regions,
    )


def test_a_worker_that_is_stopped_at_first_contact_keeps_no_other_waiting(
    ends: TransportEnds,
) -> None:
    transport = MooncakeTransport("rank", contact_seconds=LIMIT_SECONDS)
    rank = Rank(transport)
    stopped, well = ends.start_peer(), ends.start_peer()
    stopped.stop()
    waiting = rank.connect(stopped)
    rank.connect(well)
    rank.until(lambda: rank.answers)
    region = transport.register(PrivateBuffer(LARGE))
    runs = replace(ends.all_of_it(well, RANGE_BYTES), local_region=region.name)
    assert transport.write(well.info.session_id, runs).result(LIMIT_SECONDS) == LARGE
    assert rank.answers == {well.info.session_id: None}
    assert waiting.call is not None
    assert not waiting.call.done()
    stopped.resume()
    rank.until(lambda: len(rank.answers) == 2)
    assert rank.answers[stopped.info.session_id] is None
    transport.close()


def test_an_epoch_ends_while_a_write_to_a_stopped_worker_is_under_way(
    ends: TransportEnds,
) -> None:
    transport = MooncakeTransport("rank", stall_seconds=1.0, drain_seconds=0.5)
    rank = Rank(transport)
    worker, later = ends.start_peer(), ends.start_peer()
    rank.connect(worker)
    rank.until(lambda: rank.answers)
    pool = PrivateBuffer(LARGE)
    pool.tensor.fill_(1)
    region = transport.register(pool)
    runs = replace(ends.all_of_it(worker, RANGE_BYTES), local_region=region.name)
    assert stopped_in_mid_write(transport, worker, runs).kind == "stalled"
    closed: list[bool] = []
    rank.peers.retire(region, lambda: closed.append(True))
    rank.peers.settle(LIMIT_SECONDS)  # the transport refuses to let it go, and that is all
    assert closed == []

    # A new epoch: other workers are reached, and this one when nothing of the old can land.
    rank.answers.clear()
    rank.connect(worker)
    rank.connect(later)
    rank.until(lambda: rank.answers)
    assert rank.answers == {later.info.session_id: None}
    worker.resume()
    rank.until(lambda: len(rank.answers) == 2)
    assert rank.answers[worker.info.session_id] is None
    assert closed == [True]
    transport.close()

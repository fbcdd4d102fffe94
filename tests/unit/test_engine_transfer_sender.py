"""A rank's transfers over a transport whose writes end when the test says so."""

from __future__ import annotations

from concurrent.futures import Future

import msgspec
import numpy as np
import pytest

from cp_shared_kv.engine.batch import BatchRequest
from cp_shared_kv.engine.messages import RoomConcluded
from cp_shared_kv.engine.transfer_peers import TransferPeers
from cp_shared_kv.engine.transfer_sender import TransferSender
from cp_shared_kv.errors import ProtocolError, TransferError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.memory.buffers import Buffer, PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_checksums import page_checksums
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.testing.calls_at_once import CallsAtOnce
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Acknowledged,
    Concluded,
    Hello,
    OpenRoom,
    Quiesced,
    Sent,
)
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo, Runs

EPOCH, DECODE_EPOCH, OTHER_EPOCH = 10, 20, 21
SPEC = KVPoolSpec(
    latent_format("fp32", kv_lora_rank=4, qk_rope_head_dim=2, page_size=4),
    index_format("fp32", index_head_dim=2, page_size=4),
    num_layers=1,
    index_layers=(0,),
)


class HandTransport:
    """Writes are begun, and end by `land` and `fail`, in the order in which they were begun."""

    session_id = "rank"

    def __init__(self) -> None:
        self.peers: list[str] = []
        self.writes: list[tuple[str, Future[int]]] = []
        self.revives = False
        self.lets_go = True

    def register(self, buffer: Buffer) -> Region:
        return Region("mine", buffer.nbytes)

    def unregister(self, region: Region) -> None:
        assert region.name == "mine"

    def connect(self, peer: PeerInfo) -> None:
        self.peers.append(peer.session_id)

    def disconnect(self, peer: str) -> None:
        if not self.lets_go:
            raise TransferError("a write has not ended", kind="in_use", peer=peer, quiescent=False)
        self.peers.remove(peer)

    def write(self, peer: str, runs: Runs) -> Future[int]:
        future: Future[int] = Future()
        self.writes.append((peer, future))
        return future

    def revive(self, peer: str) -> bool:
        assert peer in self.peers
        return self.revives

    def close(self) -> None:
        raise AssertionError("a sender does not own its transport")

    def land(self) -> None:
        self.writes.pop(0)[1].set_result(100)

    def fail(self, *, quiescent: bool, kind: str = "stalled") -> None:
        peer, future = self.writes.pop(0)
        future.set_exception(TransferError("lost", kind=kind, peer=peer, quiescent=quiescent))


class Rank:
    """The only rank of a group, its transfers, and what it has said."""

    def __init__(self, *, verify: bool = False, sends_nothing: bool = False) -> None:
        self.transport = HandTransport()
        self.to_decode: list[Sent | Concluded | Quiesced] = []
        self.to_controller: list[msgspec.Struct] = []
        self.woken = 0
        self.answers: list[str | None] = []
        self.sender = TransferSender(
            CpSharedKVLayout(4, 1, 0, physical_pages=8),
            KVPool(SPEC, 8, PrivateBuffer(SPEC.pool_bytes(8))),
            TransferPeers(self.transport, CallsAtOnce(), self._wake),
            rank=0,
            epoch=EPOCH,
            sends_nothing=sends_nothing,
            verify=verify,
            to_decode=self.to_decode.append,
            to_controller=self.to_controller.append,
        )
        for epoch in (DECODE_EPOCH, OTHER_EPOCH):
            self.sender.connect(hello(epoch), lambda failure: self.answers.append(failure))

    def _wake(self) -> None:
        self.woken += 1

    def open(self, room: int, pages: int = 2, decode_epoch: int = DECODE_EPOCH) -> None:
        self.sender.open(
            OpenRoom(
                epoch=EPOCH,
                room=room,
                decode_epoch=decode_epoch,
                first_position=0,
                physical_pages=pack_int64(np.arange(1, pages + 1)),
                total_positions=pages,
            )
        )

    def chunk(self, room: int, chunk: int, start: int, stop: int, *, last: bool) -> None:
        self.sender.send_chunk(
            BatchRequest(
                room=room,
                prefix_tokens=4 * start,
                new_tokens=4 * (stop - start),
                logical_pages=pack_int64(np.arange(1, stop + 1)),
                chunk=chunk,
                send_start=start,
                send_stop=stop,
                last=last,
            )
        )

    def said(self) -> list[str]:
        """The kinds of messages since the last call, to decode and then to the controller."""
        said = [type(message).__name__ for message in [*self.to_decode, *self.to_controller]]
        self.to_decode.clear()
        self.to_controller.clear()
        self.sender.check_invariants()
        return said


def hello(epoch: int) -> Hello:
    return Hello(
        epoch=epoch,
        role="decode",
        session_id=f"decode {epoch}",
        transport="by hand",
        cp_size=1,
        page_size=4,
        latent_format="l",
        index_format="i",
        num_layers=1,
        index_layers=(0,),
        bytes_per_page=SPEC.bytes_per_page,
        model_fingerprint="m",
        physical_pages=8,
        regions=(Region(f"pool-{epoch}", SPEC.pool_bytes(8)),),
    )


def acknowledged(room: int, of: str = "concluded") -> Acknowledged:
    return Acknowledged(epoch=DECODE_EPOCH, peer_epoch=EPOCH, room=room, rank=0, of=of)  # type: ignore[arg-type]


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_a_replica_concludes_every_room_and_sends_nothing() -> None:
    replica = Rank(sends_nothing=True)
    replica.open(1)
    replica.chunk(1, 0, 0, 2, last=True)
    (concluded,) = replica.to_decode
    assert isinstance(concluded, Concluded)
    assert (concluded.outcome, concluded.total_positions) == ("success", 0)
    assert replica.transport.writes == []


def test_a_write_that_takes_long_holds_up_nobody(rank: Rank) -> None:
    rank.open(1)
    rank.open(2, decode_epoch=OTHER_EPOCH)
    rank.chunk(1, 0, 0, 2, last=True)
    rank.chunk(2, 0, 0, 2, last=True)
    assert [peer for peer, _ in rank.transport.writes] == ["decode 20", "decode 21"]
    assert (rank.woken, rank.said()) == (0, [])

    rank.transport.writes.reverse()
    rank.transport.land()
    assert (rank.woken, rank.said()) == (1, [])
    rank.sender.collect()
    assert rank.to_decode[0].room == 2
    assert rank.said() == ["Sent", "Concluded", "RoomConcluded"]

    rank.transport.land()
    rank.sender.collect()
    concluded = rank.to_controller[0]
    assert isinstance(concluded, RoomConcluded)
    assert (concluded.room, concluded.pages, concluded.bytes) == (1, 2, 100)
    assert rank.said() == ["Sent", "Concluded", "RoomConcluded"]


def test_chunks_are_under_way_together_and_end_in_any_order(rank: Rank) -> None:
    rank.open(1)
    rank.chunk(1, 0, 0, 1, last=False)
    rank.chunk(1, 1, 1, 2, last=True)
    rank.transport.writes.reverse()
    rank.transport.land()
    rank.sender.collect()
    assert rank.said() == ["Sent"]
    rank.transport.land()
    rank.sender.collect()
    assert rank.said() == ["Sent", "Concluded", "RoomConcluded"]


def test_a_room_stopped_during_a_write_quiesces_when_it_ends(rank: Rank) -> None:
    rank.open(1)
    rank.chunk(1, 0, 0, 2, last=True)
    rank.sender.abort(AbortRoom(epoch=EPOCH, peer_epoch=DECODE_EPOCH, room=1, reason="stop"))
    assert rank.said() == ["Concluded"]
    rank.transport.land()
    rank.sender.collect()
    assert rank.said() == ["Quiesced", "RoomConcluded"]


def test_pages_of_a_stray_write_are_kept_until_the_transport_proves_that_it_cannot_land(
    rank: Rank,
) -> None:
    rank.open(1)
    rank.chunk(1, 0, 0, 2, last=True)
    rank.transport.fail(quiescent=False)
    rank.sender.collect()
    assert rank.said() == ["Concluded"]
    rank.sender.on_decode(acknowledged(1))
    rank.sender.resend()
    assert rank.said() == []

    rank.transport.revives = True
    rank.sender.resend()
    assert rank.said() == ["Quiesced", "RoomConcluded"]
    rank.sender.on_decode(acknowledged(1, "quiesced"))
    assert not rank.sender.open_rooms


def test_a_stray_of_a_room_with_another_write_under_way_waits_for_that_as_well(rank: Rank) -> None:
    rank.open(1)
    rank.chunk(1, 0, 0, 1, last=False)
    rank.chunk(1, 1, 1, 2, last=True)
    rank.transport.fail(quiescent=False)
    rank.transport.revives = True
    rank.sender.collect()
    rank.sender.resend()
    assert rank.said() == ["Concluded", "Concluded"]
    rank.transport.land()
    rank.sender.collect()
    rank.sender.resend()
    assert rank.said() == ["Concluded", "Quiesced", "RoomConcluded"]


def test_a_worker_that_could_not_be_reached_is_looked_for(rank: Rank) -> None:
    rank.transport.revives = True
    rank.open(1)
    rank.chunk(1, 0, 0, 2, last=True)
    looked_for: list[str] = []
    rank.transport.revive = lambda peer: looked_for.append(peer) or True  # type: ignore[method-assign]
    rank.sender.resend()
    assert looked_for == []
    rank.transport.fail(quiescent=True, kind="unreachable")
    rank.sender.collect()
    rank.sender.resend()
    rank.sender.resend()
    assert looked_for == ["decode 20"]


def test_a_dead_worker_is_let_go_with_what_was_on_its_way_to_it(rank: Rank) -> None:
    rank.open(1)
    rank.open(2, decode_epoch=OTHER_EPOCH)
    rank.chunk(1, 0, 0, 2, last=True)
    rank.chunk(2, 0, 0, 2, last=True)
    rank.sender.decode_dead(DECODE_EPOCH, "killed")
    assert rank.said() == ["RoomConcluded"]
    assert rank.transport.peers == ["decode 21"]
    rank.transport.fail(quiescent=True, kind="closed")
    rank.sender.collect()
    assert rank.said() == []
    rank.transport.land()
    rank.sender.collect()
    assert rank.said() == ["Sent", "Concluded", "RoomConcluded"]


def test_a_dead_worker_to_which_a_write_may_still_land_keeps_its_rooms_until_it_cannot(
    rank: Rank,
) -> None:
    rank.open(1)
    rank.chunk(1, 0, 0, 2, last=True)
    rank.transport.lets_go = False
    rank.sender.decode_dead(DECODE_EPOCH, "killed")
    rank.sender.decode_dead(DECODE_EPOCH, "killed")
    assert rank.said() == []
    with pytest.raises(ProtocolError, match="not connected"):
        rank.open(2)
    rank.transport.lets_go = True
    rank.sender.resend()
    assert rank.said() == ["RoomConcluded"]
    assert not rank.sender.open_rooms


def test_checksums_of_the_pages_go_with_them_when_asked_for() -> None:
    rank = Rank(verify=True)
    pool = rank.sender._pool
    pool.buffer.tensor.random_(0, 256)
    rank.open(1, pages=3)
    rank.chunk(1, 0, 0, 3, last=True)
    rank.transport.land()
    rank.sender.collect()
    (sent,) = (m for m in rank.to_decode if isinstance(m, Sent))
    sources = PhysicalPages(np.arange(1, 4))
    assert sent.checksum_array() is not None
    assert np.array_equal(sent.checksum_array(), page_checksums(pool, sources))  # type: ignore[arg-type]


def test_without_verification_no_checksums_are_made() -> None:
    rank = Rank()
    rank.open(1)
    rank.chunk(1, 0, 0, 2, last=True)
    rank.transport.land()
    rank.sender.collect()
    (sent,) = (m for m in rank.to_decode if isinstance(m, Sent))
    assert sent.checksums == b""

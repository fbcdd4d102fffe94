"""A CP rank without a model: its real transfer sender, of which every write is looked at."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.messages import BatchDone, DisconnectDecode, RankState, RoomToken
from cp_shared_kv.engine.self_check import broken
from cp_shared_kv.engine.transfer_peers import TransferPeers
from cp_shared_kv.engine.transfer_sender import TransferSender
from cp_shared_kv.errors import ProtocolError, TransferError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.memory.buffers import Buffer, PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_format import PAGE_KINDS
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.testing.calls_at_once import CallsAtOnce
from cp_shared_kv.transfer.codec import unpack_int64
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Acknowledged,
    Hello,
    OpenRoom,
)
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo, Runs

PAGE_SIZE, CP_SIZE, VOCAB_SIZE = 4, 2, 100
POOL = KVPoolSpec(
    latent_format("fp32", kv_lora_rank=4, qk_rope_head_dim=2, page_size=PAGE_SIZE),
    index_format("fp32", index_head_dim=2, page_size=PAGE_SIZE),
    num_layers=2,
    index_layers=(1,),
)
Put = Callable[[str, msgspec.Struct], None]


@dataclass(eq=False)
class PendingWrite:
    """A write that has not ended, or that ended without proof that it cannot land."""

    room: int
    pages: set[int]
    """Decode's pages that its bytes lie in."""
    nbytes: int
    ended: Future[int]
    stray: bool = False


class HostileRank:
    """`put` sends to `controller` or `decode`. It is its own transport: writes begin here, and
    end by `land` and `fail`.

    An AssertionError is raised for a write outside the reservation that its room was opened with,
    and for a page that a room writes twice.
    """

    session_id = "rank"

    def __init__(
        self,
        rank: int,
        *,
        epoch: int,
        physical_pages: int,
        decode: Hello,
        verify: bool,
        put: Put,
    ) -> None:
        self.rank, self._epoch, self._put = rank, epoch, put
        self._logical_pages = physical_pages * CP_SIZE
        self._page_of_byte = page_of_byte(decode.physical_pages)
        self._reserved: dict[int, set[int]] = {}
        """Pages that a room may still write, by room."""
        self._sending: int | None = None
        self.writes: list[PendingWrite] = []
        self.sender = TransferSender(
            CpSharedKVLayout(PAGE_SIZE, CP_SIZE, rank, physical_pages=physical_pages),
            KVPool(POOL, physical_pages, PrivateBuffer(POOL.pool_bytes(physical_pages))),
            TransferPeers(self, CallsAtOnce(), wake=lambda: None),
            rank=rank,
            epoch=epoch,
            sends_nothing=False,
            verify=verify,
            to_decode=lambda message: put("decode", message),
            to_controller=lambda message: put("controller", message),
        )
        failures: list[str | None] = []
        self.sender.connect(decode, failures.append)
        assert failures == [None]

    # What it is told --------------------------------------------------------------------------

    def obey(self, message: msgspec.Struct) -> None:
        """The controller's message, as `RankEpoch` takes it."""
        match message:
            case OpenRoom():
                self.sender.open(message)
                self._reserved[message.room] = set(unpack_int64(message.physical_pages).tolist())
            case Batch():
                self._run(message)
            case AbortRoom():
                self.sender.abort(message)
            case DisconnectDecode():
                self.sender.decode_dead(message.decode_epoch, message.reason)
            case _:
                raise ProtocolError("not a message for a rank", value=type(message).__name__)

    def hear(self, message: Acknowledged | AbortRoom) -> None:
        """Decode's answer."""
        self.sender.on_decode(message)

    def look_after_transfers(self) -> None:
        """What a rank does every second."""
        self.sender.resend()
        problem = "; ".join(broken([self.sender.check_invariants])) or None
        assert problem is None, problem
        self._put("controller", RankState(rank=self.rank, open_rooms=self.sender.open_rooms))

    def _run(self, batch: Batch) -> None:
        if batch.epoch != self._epoch:
            raise ProtocolError("batch of another epoch", value=batch.epoch)
        batch.validate(
            page_size=PAGE_SIZE, logical_pages=self._logical_pages, vocab_size=VOCAB_SIZE
        )
        done = BatchDone(
            rank=self.rank,
            batch_id=batch.batch_id,
            tokens=[
                RoomToken(room=part.room, token_id=10)
                for part in batch.requests
                if part.last and part.room % CP_SIZE == self.rank
            ],
            scratch_bytes=0,
        )
        self._put("controller", done)
        for part in batch.requests:
            self._sending = part.room
            self.sender.send_chunk(part)

    # Writes -----------------------------------------------------------------------------------

    def land(self, write: PendingWrite) -> None:
        """All its bytes are at decode."""
        self.writes.remove(write)
        if not write.stray:
            write.ended.set_result(write.nbytes)
            self.sender.collect()

    def fail(self, write: PendingWrite, *, quiescent: bool) -> None:
        """It did not land; unless `quiescent`, it still may."""
        write.stray = not quiescent
        if quiescent:
            self.writes.remove(write)
        write.ended.set_exception(
            TransferError("the wire broke", kind="stalled", peer="decode", quiescent=quiescent)
        )
        self.sender.collect()

    # As its own transport ----------------------------------------------------------------------

    def register(self, buffer: Buffer) -> Region:
        return Region("mine", buffer.nbytes)

    def unregister(self, region: Region) -> None:
        assert region.name == "mine"

    def connect(self, peer: PeerInfo) -> None:
        assert peer.regions

    def disconnect(self, peer: str) -> None:
        assert peer
        self.writes.clear()

    def write(self, peer: str, runs: Runs) -> Future[int]:
        assert peer
        assert self._sending is not None
        pages: set[int] = set()
        for start, nbytes in zip(runs.remote_offset_bytes, runs.nbytes, strict=True):
            assert 0 <= start < start + nbytes <= len(self._page_of_byte)
            pages |= set(np.unique(self._page_of_byte[start : start + nbytes]).tolist())
        reserved = self._reserved[self._sending]
        assert pages <= reserved, f"rank {self.rank} writes {pages} of {reserved}"
        reserved -= pages
        ended: Future[int] = Future()
        self.writes.append(PendingWrite(self._sending, pages, runs.total_bytes, ended))
        return ended

    def revive(self, peer: str) -> bool:
        assert peer
        self.writes = [write for write in self.writes if not write.stray]
        return True

    def close(self) -> None:
        self.writes.clear()


@lru_cache
def page_of_byte(physical_pages: int) -> npt.NDArray[np.int64]:
    """For each byte of a pool of `POOL` the physical page that it belongs to; 0 is padding."""
    buffer = PrivateBuffer(POOL.pool_bytes(physical_pages))
    pool = KVPool(POOL, physical_pages, buffer)
    for kind in PAGE_KINDS:
        for layer in POOL.layers(kind):
            for page in range(physical_pages + 1):
                pool.pages(kind, layer)[page] = page
    return np.asarray(buffer.tensor.numpy(), dtype=np.int64)

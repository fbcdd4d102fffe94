"""A rank's transfers over a transport whose calls wait until the test lets them go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from cp_shared_kv.engine.batch import BatchRequest
from cp_shared_kv.engine.side_calls import ThreadEach
from cp_shared_kv.engine.transfer_peers import TransferPeers
from cp_shared_kv.engine.transfer_sender import TransferSender
from cp_shared_kv.errors import TransferError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.memory.buffers import Buffer, PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import Acknowledged, Hello, OpenRoom
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo, Runs

LIMIT_SECONDS = 30.0
SPEC = KVPoolSpec(
    latent_format("fp32", kv_lora_rank=4, qk_rope_head_dim=2, page_size=4),
    index_format("fp32", index_head_dim=2, page_size=4),
    num_layers=1,
    index_layers=(0,),
)


class SlowTransport:
    """Calls about a session in `slow` wait until the test lets them go on, one by one."""

    session_id = "rank"

    def __init__(self) -> None:
        self.slow: set[str] = set()
        self.calls: list[str] = []
        """Those that have begun and those that have ended, in order."""
        self.errors: list[Exception] = []
        """What the next slow calls to end raise."""
        self.regions: list[str] = []
        self.registered_too_long = 0
        self.writes: dict[str, list[Future[int]]] = {}
        self._begun, self._go_on = threading.Semaphore(0), threading.Semaphore(0)

    def has_begun(self) -> bool:
        """Whether a slow call has, soon, that was not asked for here before."""
        return self._begun.acquire(timeout=0.01)

    def go_on(self, error: Exception | None = None) -> None:
        """A slow call comes to its end."""
        self.errors += [] if error is None else [error]
        self._go_on.release()

    def _call(self, what: str, session_id: str) -> None:
        self.calls.append(f"{what} {session_id}")
        if session_id not in self.slow:
            return
        self._begun.release()
        assert self._go_on.acquire(timeout=LIMIT_SECONDS)
        if self.errors:
            raise self.errors.pop()
        self.calls.append(f"{what} {session_id} ends")

    def connect(self, peer: PeerInfo) -> None:
        self._call("connect", peer.session_id)

    def disconnect(self, peer: str) -> None:
        self._call("disconnect", peer)

    def revive(self, peer: str) -> bool:
        self._call("revive", peer)
        return True

    def register(self, buffer: Buffer) -> Region:
        self.regions.append(f"pool-{len(self.calls)}")
        return Region(self.regions[-1], buffer.nbytes)

    def unregister(self, region: Region) -> None:
        if self.registered_too_long:
            self.registered_too_long -= 1
            raise in_use()
        self.regions.remove(region.name)

    def write(self, peer: str, runs: Runs) -> Future[int]:
        assert runs.local_region in self.regions
        self.writes.setdefault(peer, []).append(Future())
        return self.writes[peer][-1]

    def close(self) -> None:
        raise AssertionError("a sender does not own its transport")


class SlowRank:
    """The only rank of a group, over threads. `sender` is that of its present epoch."""

    def __init__(self) -> None:
        self.transport = SlowTransport()
        self._woken = threading.Event()
        self.peers = TransferPeers(self.transport, ThreadEach(), self._woken.set)
        self.said: list[msgspec.Struct] = []
        self.answers: list[tuple[int, str | None]] = []
        self._room = 100
        self.begin(epoch=10)

    def begin(self, epoch: int) -> None:
        self.epoch = epoch
        self.sender = TransferSender(
            CpSharedKVLayout(4, 1, 0, physical_pages=8),
            KVPool(SPEC, 8, PrivateBuffer(SPEC.pool_bytes(8))),
            self.peers,
            rank=0,
            epoch=epoch,
            sends_nothing=False,
            verify=False,
            to_decode=self.said.append,
            to_controller=self.said.append,
        )

    def connect(self, epoch: int, changes: dict[str, Any] | None = None) -> None:
        greeting = replace(hello(epoch), **(changes or {}))
        self.sender.connect(greeting, lambda why: self.answers.append((epoch, why)))

    def until(self, holds: Callable[[], object]) -> None:
        """What the rank's loop does, until something holds."""
        while not holds():
            assert self._woken.wait(LIMIT_SECONDS), self.transport.calls
            self._woken.clear()
            self.sender.collect()

    def connected(self, *epochs: int) -> None:
        for epoch in epochs:
            self.connect(epoch)
        self.until(lambda: len(self.answers) >= len(epochs))
        assert sorted(self.answers) == [(epoch, None) for epoch in sorted(epochs)]

    def send(self, room: int, decode_epoch: int) -> Future[int]:
        """A room of two pages, which are on their way."""
        self.open(room, decode_epoch)
        self.sender.send_chunk(
            BatchRequest(
                room=room,
                prefix_tokens=0,
                new_tokens=8,
                logical_pages=pack_int64(np.arange(1, 3)),
                chunk=0,
                send_start=0,
                send_stop=2,
                last=True,
            )
        )
        return self.transport.writes[session(decode_epoch)][-1]

    def open(self, room: int, decode_epoch: int) -> None:
        self.sender.open(
            OpenRoom(
                epoch=self.epoch,
                room=room,
                decode_epoch=decode_epoch,
                first_position=0,
                physical_pages=pack_int64(np.arange(1, 3)),
                total_positions=2,
            )
        )

    def let_one_go_on(self, error: Exception | None = None) -> None:
        """One slow call, which has begun or will, comes to its end."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not self.transport.has_begun():
            assert time.monotonic() < deadline, self.transport.calls
            self.sender.collect()
        self.transport.go_on(error)

    def kinds(self) -> list[str]:
        """What it has said since the last call."""
        kinds = [type(message).__name__ for message in self.said]
        self.said.clear()
        self.sender.check_invariants()
        return kinds

    def sends_to(self, decode_epoch: int) -> None:
        """It does, from beginning to end, and what a rank does every second."""
        self.kinds()
        self._room += 1
        self.send(self._room, decode_epoch).set_result(100)
        self.sender.collect()
        assert self.kinds() == ["Sent", "Concluded", "RoomConcluded"]
        self.sender.on_decode(
            Acknowledged(
                epoch=decode_epoch, peer_epoch=self.epoch, room=self._room, rank=0, of="concluded"
            )
        )
        self.sender.resend()
        self.kinds()


def session(epoch: int) -> str:
    return f"decode-{epoch}"


def hello(epoch: int) -> Hello:
    return Hello(
        epoch=epoch,
        role="decode",
        session_id=session(epoch),
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


def in_use() -> TransferError:
    return TransferError("a write has not ended", kind="in_use", peer="p", quiescent=False)


def stray() -> TransferError:
    return TransferError("nothing has landed", kind="stalled", peer="p", quiescent=False)

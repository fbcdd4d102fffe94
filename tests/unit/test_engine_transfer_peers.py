"""A rank goes on while the transport waits for decode workers: to reach, find and forget them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from cp_shared_kv.engine.batch import BatchRequest
from cp_shared_kv.engine.side_calls import ThreadEach
from cp_shared_kv.engine.transfer_peers import TransferPeers
from cp_shared_kv.engine.transfer_sender import TransferSender
from cp_shared_kv.errors import ProtocolError, TransferError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.memory.buffers import Buffer, PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import Acknowledged, Hello, OpenRoom
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.transport import PeerInfo, Runs

LIMIT_SECONDS = 30.0
SLOW, WELL = 20, 21
"""Epochs of two decode workers."""
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


class Rank:
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


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    for _ in range(9):  # no thread is left behind in a call
        rank.transport.go_on()


# Connecting -------------------------------------------------------------------------------------


def test_a_worker_that_does_not_answer_holds_up_nobody(rank: Rank) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    rank.connect(WELL)
    rank.until(lambda: rank.answers)
    assert rank.answers == [(WELL, None)]
    rank.sends_to(WELL)
    rank.let_one_go_on()
    rank.until(lambda: len(rank.answers) == 2)
    assert rank.answers[1] == (SLOW, None)
    rank.sends_to(SLOW)


def test_a_room_for_a_worker_that_is_being_connected_is_refused(rank: Rank) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    with pytest.raises(ProtocolError, match="not connected: 20; allowed: one of which"):
        rank.open(1, SLOW)
    assert rank.sender.open_rooms == []
    rank.let_one_go_on()
    rank.until(lambda: rank.answers)
    rank.open(1, SLOW)


def test_a_worker_that_cannot_be_reached_is_answered_for_and_forgotten(rank: Rank) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    why = TransferError("it does not answer", kind="unreachable", peer="p", quiescent=True)
    rank.let_one_go_on(why)
    rank.until(lambda: rank.answers)
    assert rank.answers == [(SLOW, "it does not answer")]
    with pytest.raises(ProtocolError, match="not connected"):
        rank.open(1, SLOW)
    rank.let_one_go_on()
    rank.until(lambda: not rank.peers.unsettled)
    rank.transport.slow.clear()
    rank.connect(SLOW)
    rank.until(lambda: len(rank.answers) == 2)
    assert rank.answers[1] == (SLOW, None)


def test_a_worker_that_dies_while_it_is_connected_is_forgotten_when_that_has_ended(
    rank: Rank,
) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    rank.sender.decode_dead(SLOW, "killed")
    rank.sender.resend()
    rank.let_one_go_on()
    rank.let_one_go_on()
    rank.until(lambda: not rank.peers.unsettled)
    name = session(SLOW)
    assert rank.transport.calls == [
        f"connect {name}",
        f"connect {name} ends",
        f"disconnect {name}",
        f"disconnect {name} ends",
    ]
    assert rank.answers == []


def test_a_second_request_to_connect_changes_nothing_and_is_answered(rank: Rank) -> None:
    rank.connected(WELL)
    rank.connect(WELL)
    assert rank.answers == [(WELL, None)] * 2
    for changes, said in (
        ({"session_id": "another"}, "a second greeting"),
        ({"epoch": 22}, "two decode workers with one session"),
        ({"epoch": 23, "session_id": "x", "regions": ()}, "without memory"),
    ):
        with pytest.raises(ProtocolError, match=said):
            rank.connect(WELL, changes)
    assert rank.transport.calls == [f"connect {session(WELL)}"]
    rank.sends_to(WELL)


def test_asked_twice_while_a_worker_is_being_connected_the_rank_answers_once(rank: Rank) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    rank.connect(SLOW)
    rank.let_one_go_on()
    rank.until(lambda: rank.answers)
    assert rank.answers == [(SLOW, None)]


def test_a_fault_in_a_call_is_not_taken_for_an_unreachable_worker(rank: Rank) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    rank.let_one_go_on(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        rank.until(lambda: rank.answers)


# Finding again ----------------------------------------------------------------------------------


def test_while_a_lost_worker_is_looked_for_others_are_sent_to(rank: Rank) -> None:
    rank.connected(SLOW, WELL)
    rank.transport.slow.add(session(SLOW))
    rank.send(1, SLOW).set_exception(stray())
    rank.sender.collect()
    rank.sender.resend()
    rank.sender.resend()
    rank.sends_to(WELL)
    assert rank.transport.calls.count(f"revive {session(SLOW)}") == 1
    rank.let_one_go_on()
    rank.until(lambda: rank.sender.unreachable(SLOW) is None)
    assert rank.kinds() == ["Quiesced", "RoomConcluded"]


def test_what_is_lost_while_a_worker_is_looked_for_waits_until_it_is_found_once_more(
    rank: Rank,
) -> None:
    """The transport may have found it before that write was begun, and says so after it."""
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    rank.send(1, SLOW).set_exception(stray())
    rank.sender.collect()
    rank.sender.resend()
    rank.send(2, SLOW).set_exception(stray())
    rank.sender.collect()
    assert rank.kinds() == ["Concluded", "Concluded", "Concluded"]
    rank.let_one_go_on()
    rank.until(lambda: rank.said)
    assert [message.room for message in rank.said] == [1, 1]  # type: ignore[attr-defined]
    assert rank.kinds() == ["Quiesced", "RoomConcluded"]
    assert rank.sender.unreachable(SLOW) is not None
    rank.sender.resend()
    rank.kinds()
    rank.let_one_go_on()
    rank.until(lambda: rank.sender.unreachable(SLOW) is None)
    assert [message.room for message in rank.said] == [2, 2]  # type: ignore[attr-defined]
    assert rank.kinds() == ["Quiesced", "RoomConcluded"]


def test_a_worker_that_refuses_a_write_while_it_is_looked_for_is_looked_for_again(
    rank: Rank,
) -> None:
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    unreachable = TransferError("it is gone", kind="unreachable", peer="p", quiescent=True)
    rank.send(1, SLOW).set_exception(unreachable)
    rank.sender.collect()
    rank.sender.resend()
    rank.send(2, SLOW).set_exception(unreachable)
    rank.sender.collect()
    rank.let_one_go_on()
    rank.until(lambda: f"revive {session(SLOW)} ends" in rank.transport.calls)
    rank.until(lambda: rank.peers.to_find())
    assert rank.sender.unreachable(SLOW) == "it is gone"
    rank.transport.slow.clear()
    rank.sender.resend()
    rank.until(lambda: rank.sender.unreachable(SLOW) is None)


# Letting go -------------------------------------------------------------------------------------


def test_a_dead_worker_that_may_still_be_written_to_holds_up_nobody(rank: Rank) -> None:
    rank.connected(SLOW, WELL)
    rank.transport.slow.add(session(SLOW))
    rank.send(1, SLOW)
    rank.sender.decode_dead(SLOW, "killed")
    rank.sends_to(WELL)
    assert rank.sender.open_rooms == [1]
    rank.let_one_go_on(in_use())
    rank.until(lambda: rank.peers._peers[0].call is None)
    assert rank.sender.open_rooms == [1]
    rank.sender.resend()
    rank.let_one_go_on()
    rank.until(lambda: not rank.sender.open_rooms)
    assert rank.kinds() == ["RoomConcluded"]


def test_a_worker_that_dies_while_it_is_looked_for_is_forgotten_when_that_has_ended(
    rank: Rank,
) -> None:
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    rank.send(1, SLOW).set_exception(stray())
    rank.sender.collect()
    rank.sender.resend()
    rank.sender.decode_dead(SLOW, "killed")
    assert rank.transport.calls[-1] == f"revive {session(SLOW)}"
    rank.let_one_go_on()
    rank.let_one_go_on()
    rank.until(lambda: not rank.sender.open_rooms)
    assert rank.transport.calls[-1] == f"disconnect {session(SLOW)} ends"


# The end of an epoch ----------------------------------------------------------------------------


class Closed:
    """Whether a pool was given up, which must not be registered any more then."""

    def __init__(self, rank: Rank) -> None:
        self._transport, self._region = rank.transport, rank.transport.regions[-1]
        self.done = False

    def __call__(self) -> None:
        assert self._region not in self._transport.regions
        self.done = True


def test_an_epoch_ends_at_once_and_its_pool_stays_until_nothing_can_be_written_from_it(
    rank: Rank,
) -> None:
    rank.connected(SLOW, WELL)
    rank.transport.slow.add(session(SLOW))
    rank.send(1, SLOW)
    closed = Closed(rank)
    rank.sender.close(closed)
    rank.peers.settle(0.0)
    rank.begin(epoch=11)
    rank.let_one_go_on(in_use())
    rank.until(lambda: rank.peers._peers[0].call is None)
    assert not closed.done
    assert rank.sender.open_rooms == []
    rank.sender.resend()
    rank.let_one_go_on()
    rank.until(lambda: closed.done)
    assert rank.peers.unsettled == []


def test_an_epoch_ends_while_a_worker_is_being_connected(rank: Rank) -> None:
    rank.transport.slow.add(session(SLOW))
    rank.connect(SLOW)
    closed = Closed(rank)
    rank.sender.close(closed)
    assert not closed.done
    rank.let_one_go_on()
    rank.let_one_go_on()
    rank.peers.settle(LIMIT_SECONDS)
    assert closed.done
    assert rank.transport.calls[-1] == f"disconnect {session(SLOW)} ends"
    assert rank.answers == []


def test_an_epoch_ends_while_a_dead_worker_is_let_go(rank: Rank) -> None:
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    rank.sender.decode_dead(SLOW, "killed")
    closed = Closed(rank)
    rank.sender.close(closed)
    assert not closed.done
    rank.let_one_go_on()
    rank.peers.settle(LIMIT_SECONDS)
    assert closed.done
    assert rank.transport.calls.count(f"disconnect {session(SLOW)}") == 1


def test_a_pool_that_something_still_reads_is_given_up_later(rank: Rank) -> None:
    """What is on its way to a dead worker of another host ends when its connection does."""
    rank.connected(WELL)
    rank.transport.registered_too_long = 2
    closed = Closed(rank)
    rank.sender.close(closed)
    rank.peers.settle(LIMIT_SECONDS)
    assert not closed.done
    rank.peers.look()
    assert not closed.done
    rank.peers.look()
    assert closed.done


def test_waiting_for_a_worker_that_is_not_to_be_let_go_yet_ends_with_its_refusal(
    rank: Rank,
) -> None:
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    closed = Closed(rank)
    rank.sender.close(closed)
    rank.let_one_go_on(in_use())
    rank.peers.settle(LIMIT_SECONDS)
    assert not closed.done


def test_a_later_epoch_reaches_a_worker_when_its_earlier_connection_has_gone(rank: Rank) -> None:
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    closed = Closed(rank)
    rank.sender.close(closed)
    rank.begin(epoch=11)
    rank.answers.clear()
    rank.connect(SLOW)
    rank.sender.resend()
    rank.let_one_go_on(in_use())
    rank.until(lambda: rank.peers._peers[0].call is None)
    name = session(SLOW)
    assert rank.transport.calls == [f"connect {name}", f"disconnect {name}"]
    assert rank.answers == []
    rank.sender.resend()
    for _ in range(2):
        rank.let_one_go_on()
    rank.until(lambda: rank.answers)
    assert closed.done
    assert rank.transport.calls[2:] == [
        f"disconnect {name}",
        f"disconnect {name} ends",
        f"connect {name}",
        f"connect {name} ends",
    ]
    assert rank.answers == [(SLOW, None)]
    rank.sends_to(SLOW)


def test_a_connection_that_waits_its_turn_is_let_go_without_harm_to_the_one_before(
    rank: Rank,
) -> None:
    rank.connected(SLOW)
    rank.transport.slow.add(session(SLOW))
    rank.sender.decode_dead(SLOW, "killed")
    rank.connect(SLOW)
    rank.sender.decode_dead(SLOW, "killed again")
    rank.let_one_go_on()
    rank.until(lambda: not rank.peers.unsettled)
    name = session(SLOW)
    assert rank.transport.calls == [
        f"connect {name}",
        f"disconnect {name}",
        f"disconnect {name} ends",
    ]

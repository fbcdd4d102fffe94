"""What every transport keeps, on peers that are processes: refused, stopped, killed, restarted.

Those that move memory of GPUs are marked so: `-m gpu` runs them alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from cp_shared_kv.errors import TransferError
from cp_shared_kv.testing.transport_ends import (
    GPU_KINDS,
    HASTE,
    LIMIT_SECONDS,
    TransportEnds,
    TransportKind,
    in_environment_of,
    outcome,
    why_not,
)
from cp_shared_kv.testing.transport_peer import TransportPeer
from cp_shared_kv.transfer.transport import PeerInfo, Runs

SMALL, LARGE = 1 << 16, 32 << 20
RANGE_BYTES = 128 << 10
INT64_MAX = (1 << 63) - 1
FEW = 16
"""Bytes that every transport can move."""
KINDS: tuple[TransportKind, ...] = ("shared_memory", "mooncake", "faulty")
MakeEnds = Callable[[int], TransportEnds]


@pytest.fixture(params=[*KINDS, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in GPU_KINDS)])
def make_ends(request: pytest.FixtureRequest) -> Iterator[MakeEnds]:
    """Makes the one TransportEnds of a test, of each kind that this machine has."""
    made: list[TransportEnds] = []

    def make(nbytes: int) -> TransportEnds:
        made.append(TransportEnds(request.param, nbytes))
        return made[-1]

    with in_environment_of(request.param):
        if reason := why_not(request.param):
            pytest.skip(reason)
        yield make
        for ends in made:
            ends.__exit__(None, None, None)


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that other processes bring about."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.002)


def stays(peer: TransportPeer) -> None:
    """Nothing lands in the peer's memory any more."""
    before = peer.memory.copy()
    time.sleep(0.2)
    np.testing.assert_array_equal(peer.memory, before)


class Writer:
    """Writes from a thread, as shared memory takes as long as the copy does."""

    def __init__(self, ends: TransportEnds, peer: TransportPeer, times: int) -> None:
        self._threads = ThreadPoolExecutor(1)
        runs = ends.all_of_it(peer, RANGE_BYTES)

        def write() -> int | TransferError:
            return outcome(ends.transport.write(peer.info.session_id, runs))

        self.writes: list[Future[int | TransferError]] = [
            self._threads.submit(write) for _ in range(times * HASTE.get(ends.kind, 1))
        ]

    def outcomes(self) -> list[int | TransferError]:
        found = [write.result(2 * LIMIT_SECONDS) for write in self.writes]
        self._threads.shutdown()
        return found


# What moves -------------------------------------------------------------------------------------


def test_a_write_lands_in_the_peers_memory_and_nowhere_else(make_ends: MakeEnds) -> None:
    ends = make_ends(SMALL)
    peer, other = ends.peer(), ends.peer()
    rng = np.random.default_rng(1)
    expected = np.zeros(SMALL, dtype=np.uint8)
    for _ in range(20):
        starts = rng.permutation(np.arange(0, SMALL, 512))[:40]
        sources = ends.unit * rng.integers(0, (SMALL - 512) // ends.unit, 40)
        nbytes = ends.unit * rng.integers(1, 512 // ends.unit, 40)
        for start, source, n in zip(starts, sources, nbytes, strict=True):
            expected[start : start + n] = ends.source[source : source + n]
        assert ends.write(peer, ends.runs(peer, sources, starts, nbytes)) == nbytes.sum()
        np.testing.assert_array_equal(peer.memory, expected)
    assert not other.memory.any()


def test_ten_thousand_ranges_land(make_ends: MakeEnds) -> None:
    ends = make_ends(10_000 * 1056)
    peer = ends.peer()
    slots = np.arange(10_000, dtype=np.int64) * 1056
    to = np.random.default_rng(2).permutation(slots)
    assert ends.write(peer, ends.runs(peer, slots, to, np.full(10_000, 1056))) == ends.nbytes
    np.testing.assert_array_equal(
        peer.memory.reshape(-1, 1056)[to // 1056], ends.source.reshape(-1, 1056)
    )


def test_no_ranges_are_no_bytes_and_an_empty_range_is_refused(make_ends: MakeEnds) -> None:
    ends = make_ends(SMALL)
    peer = ends.peer()
    assert ends.write(peer, ends.runs(peer, [], [], [])) == 0
    error = ends.failure(peer, ends.runs(peer, [0, 8], [0, 8], [8, 0]))
    assert (error.kind, error.quiescent) == ("local_range", True)
    assert not peer.memory.any()


def test_writers_do_not_mix_up_their_bytes(make_ends: MakeEnds) -> None:
    ends = make_ends(1 << 20)
    peers = [ends.peer(), ends.peer()]
    stripe = ends.nbytes // 8

    def write(thread: int) -> None:
        """Thread i writes stripe i of both peers in small ranges; the first half of all stripes."""
        for peer in peers:
            for start in range(thread * stripe, (thread + 1) * stripe, stripe // 16):
                offsets = np.arange(start, start + stripe // 16, 512)
                ends.write(peer, ends.runs(peer, offsets, offsets, np.full(len(offsets), 512)))

    senders = [ends.start_peer(), ends.start_peer()]
    half = ends.nbytes // 2
    for value, sender in enumerate(senders):
        sender.tell_to_write(peers[value], value + 1, (half, ends.nbytes), times=20)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert [sender.answer() for sender in senders] == ["landed", "landed"]
    for value, peer in enumerate(peers):
        np.testing.assert_array_equal(peer.memory[:half], ends.source[:half])
        assert (peer.memory[half:] == value + 1).all()


# What is refused --------------------------------------------------------------------------------


def test_a_range_outside_a_region_is_refused_and_nothing_moves(make_ends: MakeEnds) -> None:
    ends = make_ends(SMALL)
    peer = ends.peer()
    for (start, to, nbytes), kind in [
        ((SMALL - 9, 0, 10), "local_range"),
        ((-1, 0, 10), "local_range"),
        ((INT64_MAX, 0, 10), "local_range"),
        ((0, 0, -5), "local_range"),
        ((0, SMALL - 9, 10), "remote_range"),
        ((0, -1, 10), "remote_range"),
        ((0, INT64_MAX - 4, 10), "remote_range"),
        ((0, -(1 << 63), 10), "remote_range"),
    ]:
        error = ends.failure(peer, ends.runs(peer, [0, start], [0, to], [10, nbytes]))
        assert (error.kind, error.peer, error.quiescent) == (kind, peer.info.session_id, True)
        assert not peer.memory.any()
    assert ends.write(peer, ends.runs(peer, 0, 0, FEW)) == FEW


def test_what_is_not_registered_here_or_announced_there_is_refused(make_ends: MakeEnds) -> None:
    ends = make_ends(SMALL)
    peer = ends.peer()
    one = np.ones(1, dtype=np.int64)
    gone = ends.transport.register(ends.memory(64))
    ends.transport.unregister(gone)
    for local, remote, named in [
        (gone.name, peer.region, "local region"),
        (ends.region.name, "nothing", "remote region nothing"),
    ]:
        error = ends.failure(peer, Runs(local, remote, one, one, one))
        assert (error.kind, error.quiescent) == ("unknown_region", True)
        assert named in str(error)
    assert not peer.memory.any()


def test_a_session_is_what_it_was_connected_as(make_ends: MakeEnds) -> None:
    ends = make_ends(SMALL)
    peer = ends.peer()
    ends.transport.connect(peer.info)
    with pytest.raises(TransferError) as refused:
        ends.transport.connect(PeerInfo(peer.info.session_id, peer.info.regions * 2))
    assert refused.value.kind == "conflict"
    ends.transport.disconnect(peer.info.session_id)
    ends.transport.disconnect(peer.info.session_id)
    error = ends.failure(peer, ends.runs(peer, 0, 0, FEW))
    assert (error.kind, error.quiescent) == ("unknown_peer", True)
    assert not ends.transport.revive(peer.info.session_id)
    ends.transport.connect(peer.info)
    assert ends.write(peer, ends.runs(peer, 0, 0, FEW)) == FEW


def test_after_close_everything_is_refused(make_ends: MakeEnds) -> None:
    ends = make_ends(SMALL)
    peer = ends.peer()
    ends.transport.close()
    ends.transport.close()
    assert ends.failure(peer, ends.runs(peer, 0, 0, FEW)).kind == "closed"
    with pytest.raises(TransferError, match="closed"):
        ends.transport.connect(peer.info)


# Who goes meanwhile -----------------------------------------------------------------------------


def test_a_region_stays_registered_while_a_write_reads_it(make_ends: MakeEnds) -> None:
    ends = make_ends(LARGE)
    peer = ends.peer()
    writer = Writer(ends, peer, times=6)
    until(lambda: bool(peer.memory[::4096].any()))
    refusals: list[TransferError] = []

    def unregistered() -> bool:
        try:
            ends.transport.unregister(ends.region)
        except TransferError as error:
            refusals.append(error)
            return False
        return True

    until(unregistered)
    ends.wipe()
    outcomes = writer.outcomes()
    assert {(error.kind, error.quiescent) for error in refusals} == {("in_use", False)}
    for found in outcomes:
        assert found == LARGE or (
            isinstance(found, TransferError) and found.kind == "unknown_region"
        )
    assert outcomes[0] == LARGE
    assert (peer.memory != 0).all()  # none of what was written into the source afterwards


@pytest.mark.parametrize("leave", ["disconnect", "close"])
def test_once_it_has_left_nothing_of_its_lands(make_ends: MakeEnds, leave: str) -> None:
    ends = make_ends(LARGE)
    peer = ends.peer()
    writer = Writer(ends, peer, times=4)
    until(lambda: bool(peer.memory[::4096].any()))
    if leave == "close":
        ends.transport.close()
    else:
        ends.transport.disconnect(peer.info.session_id)
    ends.wipe()
    stays(peer)
    for found in writer.outcomes():
        assert found == LARGE or (isinstance(found, TransferError) and found.quiescent)
    assert (peer.memory[: RANGE_BYTES // 4] != 0).any()


def test_a_killed_peer_takes_no_other_writes_with_it(make_ends: MakeEnds) -> None:
    ends = make_ends(LARGE)
    victim, healthy = ends.peer(), ends.peer()
    writer = Writer(ends, victim, times=6)
    until(lambda: bool(victim.memory[::4096].any()))
    victim.kill()
    assert ends.write(healthy, ends.all_of_it(healthy, RANGE_BYTES)) == LARGE
    for found in writer.outcomes():
        assert found == LARGE or (isinstance(found, TransferError) and found.quiescent)
    ends.wipe()
    stays(victim)
    late = outcome(ends.transport.write(victim.info.session_id, ends.runs(victim, 0, 0, FEW)))
    assert late == FEW or (isinstance(late, TransferError) and late.kind == "unreachable")
    ends.transport.disconnect(victim.info.session_id)
    ends.transport.unregister(ends.region)
    assert (healthy.memory != 0).all()


def test_a_stopped_peer_holds_up_nobody_and_loses_nothing(make_ends: MakeEnds) -> None:
    ends = make_ends(LARGE)
    stopped, healthy = ends.peer(), ends.peer()
    writer = Writer(ends, stopped, times=3)
    until(lambda: bool(stopped.memory[::4096].any()))
    stopped.stop()
    began = time.monotonic()
    assert ends.write(healthy, ends.all_of_it(healthy, RANGE_BYTES)) == LARGE
    newcomer = ends.peer()
    assert ends.write(newcomer, ends.runs(newcomer, 0, 0, FEW)) == FEW
    assert time.monotonic() - began < LIMIT_SECONDS / 2
    outcomes = writer.outcomes()
    stopped.resume()
    if not all(found == LARGE for found in outcomes):
        until(lambda: ends.transport.revive(stopped.info.session_id))
    # Its pages may be used for something else now, and so may the source's.
    ends.transport.unregister(ends.region)
    ends.wipe()
    stays(stopped)
    again = ends.transport.register(ends.memory(FEW))
    one = np.zeros(1, dtype=np.int64)
    last = Runs(again.name, stopped.region, one, one, one + FEW)
    assert ends.write(stopped, last) == FEW
    assert not stopped.memory[:FEW].any()


def test_a_dead_peer_is_no_danger(make_ends: MakeEnds) -> None:
    ends = make_ends(SMALL)
    dead, healthy = ends.start_peer(), ends.peer()
    dead.remove()
    with pytest.raises(TransferError) as refused:
        ends.transport.connect(dead.info)
    assert (refused.value.kind, refused.value.quiescent) == ("unreachable", True)
    assert ends.failure(dead, ends.runs(dead, 0, 0, FEW)).kind in ("unreachable", "unknown_peer")
    assert not ends.transport.revive(dead.info.session_id)
    ends.transport.disconnect(dead.info.session_id)
    assert ends.write(healthy, ends.runs(healthy, 0, 0, FEW)) == FEW


def test_a_restarted_peer_gets_nothing_of_its_earlier_life(make_ends: MakeEnds) -> None:
    ends = make_ends(SMALL)
    earlier = ends.peer()
    assert ends.write(earlier, ends.runs(earlier, 0, 0, FEW)) == FEW
    earlier.remove()
    restarted = ends.start_peer()
    for _ in range(2):
        outcome(ends.transport.write(earlier.info.session_id, ends.runs(earlier, 0, 0, SMALL)))
        ends.transport.revive(earlier.info.session_id)
    assert not restarted.memory.any()
    ends.transport.disconnect(earlier.info.session_id)
    ends.transport.connect(restarted.info)
    assert ends.write(restarted, ends.runs(restarted, 0, 0, FEW)) == FEW


def test_a_killed_sender_leaves_a_peer_that_settles(make_ends: MakeEnds) -> None:
    ends = make_ends(LARGE)
    peer, sender = ends.peer(), ends.start_peer()
    for value in (1, 2):
        sender.tell_to_write(peer, value, (0, LARGE), times=1000)
        until(lambda value=value: bool((peer.memory[::4096] == value).any()))
        sender.kill()
        until(lambda: peer.ask("settled"))
        stays(peer)
        sender = ends.start_peer()
    assert ends.write(peer, ends.all_of_it(peer, RANGE_BYTES)) == LARGE
    np.testing.assert_array_equal(peer.memory, ends.source)

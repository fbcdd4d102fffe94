"""The transport of one host: what a write moves, what it refuses, and who may go meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import PrivateBuffer, SharedMemoryBuffer
from cp_shared_kv.transfer import shared_memory
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.shared_memory import SharedMemoryTransport
from cp_shared_kv.transfer.strided_copy import copy_runs
from cp_shared_kv.transfer.transport import KVTransport, PeerInfo, Runs, first_outside

SIZE = 4096
INT64_MAX = (1 << 63) - 1
_names = count()


def int64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class Ends:
    """A sender with one region, and a receiver's pool that it has mapped."""

    def __init__(self) -> None:
        name = f"cpkv-test-{threading.get_native_id()}-{next(_names)}"
        self.pool = SharedMemoryBuffer.create(name, SIZE)
        self.source = PrivateBuffer(SIZE)
        self.source.tensor.numpy()[:] = np.arange(SIZE) % 251
        self.transport = SharedMemoryTransport("sender")
        self.local = self.transport.register(self.source)
        self.peer = PeerInfo("receiver", (Region(name, SIZE),))
        self.transport.connect(self.peer)

    def runs(self, local: np.ndarray, remote: np.ndarray, nbytes: np.ndarray) -> Runs:
        return Runs(self.local.name, self.peer.regions[0].name, local, remote, nbytes)

    def write(self, *run: int) -> int:
        start, to, nbytes = run
        runs = self.runs(int64(start), int64(to), int64(nbytes))
        return self.transport.write("receiver", runs).result()

    def failure(self, runs: Runs, peer: str = "receiver") -> TransferError:
        with pytest.raises(TransferError) as failed:
            self.transport.write(peer, runs).result()
        return failed.value


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.transport.close()
    made.pool.unlink()


def test_it_keeps_the_protocol() -> None:
    transport: KVTransport = SharedMemoryTransport("sender")
    assert transport.session_id == "sender"


def test_a_write_lands_in_the_peers_memory_and_nowhere_else(ends: Ends) -> None:
    runs = ends.runs(int64(0, 100), int64(50, 3000), int64(10, 200))
    future = ends.transport.write("receiver", runs)
    assert future.done()
    assert future.result() == 210
    expected = np.zeros(SIZE, dtype=np.uint8)
    expected[50:60] = ends.source.tensor.numpy()[:10]
    expected[3000:3200] = ends.source.tensor.numpy()[100:300]
    np.testing.assert_array_equal(ends.pool.tensor.numpy(), expected)


def test_no_ranges_are_no_bytes(ends: Ends) -> None:
    assert ends.transport.write("receiver", ends.runs(int64(), int64(), int64())).result() == 0


def test_the_name_may_be_unlinked_once_it_is_mapped(ends: Ends) -> None:
    ends.pool.unlink()
    assert ends.write(0, 0, SIZE) == SIZE
    np.testing.assert_array_equal(ends.pool.tensor.numpy(), ends.source.tensor.numpy())


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        ((SIZE - 9, 0, 10), "local_range"),
        ((-1, 0, 10), "local_range"),
        ((0, SIZE - 9, 10), "remote_range"),
        ((0, -1, 10), "remote_range"),
        ((0, 0, 0), "local_range"),
        ((0, 0, -5), "local_range"),
        ((INT64_MAX, 0, 10), "local_range"),
        ((0, INT64_MAX - 4, 10), "remote_range"),
        ((0, -(1 << 63), 10), "remote_range"),
        ((0, 0, INT64_MAX), "local_range"),
    ],
)
def test_a_range_outside_a_region_is_refused_and_nothing_moves(
    ends: Ends, run: tuple[int, int, int], kind: str
) -> None:
    start, to, nbytes = run
    error = ends.failure(ends.runs(int64(0, start), int64(0, to), int64(10, nbytes)))
    assert (error.kind, error.peer, error.quiescent) == (kind, "receiver", True)
    assert "range 1" in str(error)
    assert not ends.pool.tensor.any()


@given(
    size=st.integers(0, 40),
    offset=st.integers(-5, 50) | st.sampled_from([INT64_MAX, -INT64_MAX - 1, INT64_MAX - 3]),
    nbytes=st.integers(-5, 50) | st.sampled_from([INT64_MAX, -INT64_MAX - 1, INT64_MAX - 3]),
)
def test_the_range_check_agrees_with_unbounded_integers(
    size: int, offset: int, nbytes: int
) -> None:
    inside = offset >= 0 and nbytes > 0 and offset + nbytes <= size
    assert (first_outside(int64(offset), int64(nbytes), size) is None) == inside


def test_a_region_that_is_not_there_is_named(ends: Ends) -> None:
    one = int64(1)
    here, there = ends.local.name, ends.peer.regions[0].name
    for runs, named in [
        (Runs("nothing", there, one, one, one), "local region nothing"),
        (Runs(here, "nothing", one, one, one), "remote region nothing"),
    ]:
        error = ends.failure(runs)
        assert (error.kind, error.quiescent) == ("unknown_region", True)
        assert named in str(error)


def test_a_peer_that_is_not_connected_is_refused(ends: Ends) -> None:
    runs = ends.runs(int64(0), int64(0), int64(1))
    error = ends.failure(runs, peer="stranger")
    assert (error.kind, error.peer, error.quiescent) == ("unknown_peer", "stranger", True)
    ends.transport.disconnect("receiver")
    ends.transport.disconnect("receiver")
    assert ends.failure(runs).kind == "unknown_peer"


def test_after_close_everything_is_refused(ends: Ends) -> None:
    ends.transport.close()
    ends.transport.close()
    assert ends.failure(ends.runs(int64(0), int64(0), int64(1))).kind == "closed"
    for call in (
        lambda: ends.transport.connect(ends.peer),
        lambda: ends.transport.register(PrivateBuffer(8)),
    ):
        with pytest.raises(TransferError) as refused:
            call()
        assert refused.value.kind == "closed"


def test_a_peer_whose_memory_is_not_there_is_unreachable_until_it_is_revived(ends: Ends) -> None:
    late = Region(f"{ends.peer.regions[0].name}-late", 64)
    assert not ends.transport.revive("late")
    with pytest.raises(TransferError) as refused:
        ends.transport.connect(PeerInfo("late", (late,)))
    assert (refused.value.kind, refused.value.peer) == ("unreachable", "late")
    runs = Runs(ends.local.name, late.name, int64(0), int64(0), int64(8))
    assert ends.failure(runs, peer="late").kind == "unreachable"
    assert not ends.transport.revive("late")
    pool = SharedMemoryBuffer.create(late.name, 64)
    assert ends.transport.revive("late")
    pool.unlink()
    assert ends.transport.write("late", runs).result() == 8


def test_a_region_of_another_size_than_announced_is_refused(ends: Ends) -> None:
    (region,) = ends.peer.regions
    with pytest.raises(TransferError, match="8192 bytes"):
        ends.transport.connect(PeerInfo("liar", (Region(region.name, SIZE * 2),)))


def test_connecting_again_is_no_matter_but_not_with_other_regions(ends: Ends) -> None:
    ends.transport.connect(ends.peer)
    with pytest.raises(TransferError, match="other regions"):
        ends.transport.connect(PeerInfo("receiver", ()))


def test_a_region_is_registered_once_and_forgotten_once(ends: Ends) -> None:
    with pytest.raises(TransferError) as refused:
        ends.transport.register(ends.source)
    assert refused.value.kind == "conflict"
    ends.transport.unregister(ends.local)
    with pytest.raises(TransferError) as refused:
        ends.transport.unregister(ends.local)
    assert refused.value.kind == "unknown_region"


class HeldCopy:
    """Stands in for the copy: begins, and goes on when told to."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *arguments: np.ndarray) -> None:
        self.begun.set()
        assert self.go_on.wait(10)
        copy_runs(*arguments)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldCopy:
    copy = HeldCopy()
    monkeypatch.setattr(shared_memory, "copy_runs", copy)
    return copy


def test_a_region_cannot_be_forgotten_while_a_write_reads_from_it(
    ends: Ends, held: HeldCopy
) -> None:
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(ends.write, 0, 0, 8)
        assert held.begun.wait(10)
        with pytest.raises(TransferError) as refused:
            ends.transport.unregister(ends.local)
        assert (refused.value.kind, refused.value.quiescent) == ("in_use", False)
        held.go_on.set()
        assert writing.result(10) == 8
    ends.transport.unregister(ends.local)


@pytest.mark.parametrize("leave", ["disconnect", "close"])
def test_leaving_waits_for_the_writes_under_way(ends: Ends, held: HeldCopy, leave: str) -> None:
    arguments = ("receiver",) if leave == "disconnect" else ()
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(ends.write, 0, 0, 8)
        assert held.begun.wait(10)
        leaving = threads.submit(getattr(ends.transport, leave), *arguments)
        with pytest.raises(TimeoutError):
            leaving.result(0.05)
        held.go_on.set()
        leaving.result(10)
        assert writing.result(10) == 8


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("leave", ["disconnect", "close"])
def test_a_copy_that_breaks_in_another_way_keeps_nobody_from_leaving(
    ends: Ends,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    leave: str,
) -> None:
    def broken(*_arguments: np.ndarray) -> None:
        raise error

    monkeypatch.setattr(shared_memory, "copy_runs", broken)
    ends.transport.END_SECONDS = 0.05
    with pytest.raises(error):
        ends.write(0, 0, 8)
    if leave == "disconnect":
        ends.transport.disconnect("receiver")
        ends.transport.unregister(ends.local)
    ends.transport.close()


def test_a_shared_source_may_be_written_from_too(ends: Ends) -> None:
    name = f"{ends.peer.regions[0].name}-source"
    shared = SharedMemoryBuffer.create(name, 64)
    shared.unlink()
    shared.tensor.fill_(9)
    region = ends.transport.register(shared)
    assert region == Region(name, 64)
    runs = Runs(name, ends.peer.regions[0].name, int64(0), int64(1), int64(64))
    assert ends.transport.write("receiver", runs).result() == 64
    assert ends.pool.tensor[:66].tolist() == [0] + [9] * 64 + [0]


@st.composite
def byte_ranges(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Even stretches, as pages make them, with odd ranges between; destinations disjoint."""
    ranges: list[tuple[int, int, int]] = []
    free = 0
    for _ in range(draw(st.integers(0, 5))):
        length = draw(st.integers(1, 6))
        number = draw(st.integers(1, 7))
        step_to = length + draw(st.integers(0, 4))
        step_from = draw(st.integers(-8, 8))
        start = draw(st.integers(60, 100))
        stretch = [(start + i * step_from, free + i * step_to, length) for i in range(number)]
        free += number * step_to
        ranges += reversed(stretch) if draw(st.booleans()) else stretch
    return draw(st.permutations(ranges)) if draw(st.booleans()) else ranges


@settings(max_examples=200, deadline=None)
@given(ranges=byte_ranges())
def test_the_copy_equals_a_copy_range_by_range(ranges: list[tuple[int, int, int]]) -> None:
    source = np.random.default_rng(0).integers(0, 256, 200).astype(np.uint8)
    copied, expected = np.zeros(400, dtype=np.uint8), np.zeros(400, dtype=np.uint8)
    for start, to, nbytes in ranges:
        expected[to : to + nbytes] = source[start : start + nbytes]
    columns = np.array(ranges, dtype=np.int64).reshape(-1, 3).T
    copy_runs(source, copied, *columns)
    np.testing.assert_array_equal(copied, expected)

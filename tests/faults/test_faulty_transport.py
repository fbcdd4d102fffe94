"""The faulty transport: its faults happen, its reports are true, and seeds repeat both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import PrivateBuffer, SharedMemoryBuffer
from cp_shared_kv.testing.cut_runs import cut_at_byte, cut_in_parts
from cp_shared_kv.testing.faulty_transport import Faults, FaultyTransport
from cp_shared_kv.testing.transport_ends import MILD, outcome
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.shared_memory import SharedMemoryTransport
from cp_shared_kv.transfer.transport import KVTransport, PeerInfo, Runs

PAGE, PAGES = 64, 64
SIZE = PAGE * PAGES


class World:
    """A faulty transport around shared memory, and the receiver's pool, both in this process."""

    def __init__(
        self, pool: SharedMemoryBuffer, seed: int, faults: Faults, **more: Callable[[], None]
    ) -> None:
        pool.tensor.zero_()
        self.memory = pool.tensor.numpy()
        self.transport: KVTransport = FaultyTransport(
            SharedMemoryTransport("sender"), seed, faults, **more
        )
        source = PrivateBuffer(SIZE)
        source.tensor.numpy()[:] = np.arange(SIZE) % 255 + 1
        self.source = source.tensor.numpy()
        self.local = self.transport.register(source)
        assert pool.name is not None
        self.peer = PeerInfo("receiver", (Region(pool.name, SIZE),))
        self.transport.connect(self.peer)

    def page(self, page: int, pages: int = 1) -> Runs:
        offsets = np.arange(page, page + pages, dtype=np.int64) * PAGE
        return Runs(
            self.local.name, self.peer.regions[0].name, offsets, offsets, np.full(pages, PAGE)
        )

    def write(self, page: int, pages: int = 1) -> int | TransferError:
        return outcome(self.transport.write("receiver", self.page(page, pages)))

    def landed(self) -> list[int]:
        """Pages of which at least one byte has landed."""
        return np.flatnonzero(self.memory.reshape(PAGES, PAGE).any(axis=1)).tolist()

    def complete(self) -> list[int]:
        """Pages that have landed in full."""
        same = self.memory.reshape(PAGES, PAGE) == self.source.reshape(PAGES, PAGE)
        return np.flatnonzero(same.all(axis=1)).tolist()


@pytest.fixture
def pool() -> Iterator[SharedMemoryBuffer]:
    made = SharedMemoryBuffer.create(f"cpkv-test-faulty-{threading.get_native_id()}", SIZE)
    yield made
    made.unlink()


def kinds(world: World) -> list[str]:
    """Every page in a write of its own: how each ended."""
    found = [world.write(page) for page in range(PAGES)]
    return ["landed" if isinstance(end, int) else end.kind for end in found]


def test_mild_faults_are_not_to_be_noticed(pool: SharedMemoryBuffer) -> None:
    world = World(pool, 1, MILD)
    futures = [
        world.transport.write("receiver", world.page(page, 2)) for page in range(0, PAGES, 2)
    ]
    assert [outcome(future) for future in futures] == [2 * PAGE] * 32
    np.testing.assert_array_equal(world.memory, world.source)
    world.transport.close()


def test_a_dropped_write_leaves_nothing_and_a_partial_one_something(
    pool: SharedMemoryBuffer,
) -> None:
    world = World(pool, 2, Faults(drop=0.3, partial=0.3, parts=4))
    ends = kinds(world)
    assert set(ends) == {"landed", "dropped", "partial"}
    for page, end in enumerate(ends):
        assert (page in world.complete()) == (end == "landed")
        assert not (end == "dropped" and page in world.landed())
    assert any(end == "partial" and page in world.landed() for page, end in enumerate(ends))


def test_a_late_write_lands_after_it_was_reported_as_failed(pool: SharedMemoryBuffer) -> None:
    world = World(pool, 3, Faults(late=1.0, late_seconds=0.3))
    error = world.write(0, PAGES)
    assert isinstance(error, TransferError)
    assert (error.kind, error.quiescent) == ("late", False)
    assert not world.landed()
    with pytest.raises(TransferError) as refused:
        world.transport.unregister(world.local)
    assert (refused.value.kind, refused.value.quiescent) == ("in_use", False)
    assert not world.transport.revive("receiver")
    second = world.write(1)
    assert isinstance(second, TransferError)
    assert (second.kind, second.quiescent) == ("unreachable", True)
    deadline = time.monotonic() + 10
    while not world.transport.revive("receiver"):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert world.complete() == list(range(PAGES))
    world.transport.unregister(world.local)


@pytest.mark.parametrize("leave", ["disconnect", "close"])
def test_leaving_waits_for_late_writes(pool: SharedMemoryBuffer, leave: str) -> None:
    world = World(pool, 4, Faults(late=1.0, late_seconds=0.2))
    assert isinstance(world.write(0, PAGES), TransferError)
    if leave == "disconnect":
        world.transport.disconnect("receiver")
    else:
        world.transport.close()
    assert world.complete() == list(range(PAGES))


@pytest.mark.parametrize("byte", [0, 1, PAGE - 1, PAGE, 3 * PAGE + 17, SIZE - 1])
def test_it_dies_at_the_byte_it_was_told(pool: SharedMemoryBuffer, byte: int) -> None:
    died = threading.Event()
    world = World(pool, 5, Faults(die_at_byte=byte), died=died.set)
    futures = [
        world.transport.write("receiver", world.page(page, 4)) for page in range(0, PAGES, 4)
    ]
    ends = [outcome(future) for future in futures]
    assert died.wait(10)
    np.testing.assert_array_equal(world.memory[:byte], world.source[:byte])
    assert not world.memory[byte:].any()
    whole = byte // (4 * PAGE)
    assert ends[:whole] == [4 * PAGE] * whole
    for end in [*ends[whole:], world.write(0)]:
        assert isinstance(end, TransferError)
        assert (end.kind, end.quiescent) == ("closed", True)
    assert not world.transport.revive("receiver")


def test_a_seed_repeats_its_faults_and_another_has_others(pool: SharedMemoryBuffer) -> None:
    faults = Faults(drop=0.2, partial=0.3, parts=4, duplicate=0.2)
    runs: list[tuple[list[str], bytes]] = []
    for seed in (6, 6, 7):
        world = World(pool, seed, faults)
        runs.append((kinds(world), world.memory.tobytes()))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]


def test_parts_and_writes_overtake_each_other(pool: SharedMemoryBuffer) -> None:
    world = World(pool, 8, Faults(delay_seconds=0.2))
    order: list[int] = []
    futures = [world.transport.write("receiver", world.page(page)) for page in range(16)]
    for page, future in enumerate(futures):
        future.add_done_callback(lambda done, page=page: order.append(page))
    assert all(outcome(future) == PAGE for future in futures)
    world.transport.close()
    assert sorted(order) == list(range(16))
    assert order != sorted(order)


@settings(deadline=None, max_examples=100)
@given(
    nbytes=st.lists(st.integers(1, 9), max_size=6),
    parts=st.integers(1, 5),
    seed=st.integers(0, 99),
    at=st.integers(-3, 60),
)
def test_cut_runs_are_the_same_bytes(nbytes: list[int], parts: int, seed: int, at: int) -> None:
    lengths = np.array(nbytes, dtype=np.int64)
    starts = np.arange(len(nbytes), dtype=np.int64) * 20
    runs = Runs("here", "there", starts, starts + 7, lengths)

    def pairs(*cut: Runs) -> list[tuple[int, int]]:
        return [
            (local + i, remote + i)
            for part in cut
            for local, remote, n in zip(
                part.local_offset_bytes, part.remote_offset_bytes, part.nbytes, strict=True
            )
            for i in range(n)
        ]

    head, tail = cut_at_byte(runs, at)
    assert head.total_bytes == min(max(at, 0), runs.total_bytes)
    assert pairs(head, tail) == pairs(runs)
    cut = cut_in_parts(runs, parts, np.random.default_rng(seed))
    assert pairs(*cut) == pairs(runs)
    assert len(cut) <= parts
    assert all(part.count and (part.nbytes > 0).all() for part in cut)

"""Whole rooms with real pools, messages and copies: the bytes at decode are those of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages, Positions
from cp_shared_kv.memory.buffers import PrivateBuffer, SharedMemoryBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.transfer.actions import Covered, PrefillAction, SendMessage, SubmitWrite
from cp_shared_kv.transfer.decode_session import DecodeSession, DecodeState
from cp_shared_kv.transfer.descriptors import (
    PageAreas,
    expand,
    merge_pages,
    stripe_destinations,
)
from cp_shared_kv.transfer.messages import decode, encode
from cp_shared_kv.transfer.prefill_session import PrefillSession
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.reservation import Reservation
from cp_shared_kv.transfer.shared_memory import SharedMemoryTransport
from cp_shared_kv.transfer.transport import PeerInfo

SPEC = KVPoolSpec(
    latent_format("fp32", kv_lora_rank=8, qk_rope_head_dim=4, page_size=4),
    index_format("fp32", index_head_dim=4, page_size=4),
    num_layers=3,
    index_layers=(0, 2),
)
AREAS = [(kind, layer) for kind in ("latent", "index") for layer in SPEC.layers(kind)]
DECODE_PAGES = 40
ROOM, PREFILL_EPOCH, DECODE_EPOCH = 3, 10, 20
POISON = 0xAB
_names = count()


class Group:
    """N ranks with a pool each, full of noise, and the decode pool that all of them have mapped."""

    def __init__(self, cp_size: int, physical_pages: int, decode_buffer: SharedMemoryBuffer):
        rng = np.random.default_rng(cp_size)
        self.layouts = [
            CpSharedKVLayout(4, cp_size, rank, physical_pages=physical_pages)
            for rank in range(cp_size)
        ]
        self.pools: list[KVPool] = []
        self.transports: list[SharedMemoryTransport] = []
        self.region = Region(str(decode_buffer.name), decode_buffer.nbytes)
        self.areas = PageAreas.between(SPEC, physical_pages, DECODE_PAGES)
        for rank in range(cp_size):
            buffer = PrivateBuffer(SPEC.pool_bytes(physical_pages))
            buffer.tensor.numpy()[:] = rng.integers(0, 256, buffer.nbytes)
            self.pools.append(KVPool(SPEC, physical_pages, buffer))
            transport = SharedMemoryTransport(f"rank-{rank}")
            transport.connect(PeerInfo("decode", (self.region,)))
            self.transports.append(transport)
        self.locals = [
            t.register(p.buffer) for t, p in zip(self.transports, self.pools, strict=True)
        ]
        self.sent_bytes = 0
        self.descriptors = 0

    def carry_out(
        self, rank: int, session: PrefillSession, actions: list[PrefillAction]
    ) -> Iterator[bytes]:
        """What an engine does with a session's actions. Yields what goes on the wire."""
        for action in actions:
            if isinstance(action, SendMessage):
                yield encode(action.message)
            elif isinstance(action, SubmitWrite):
                runs = expand(
                    merge_pages(action.source_physical_pages, action.destination_physical_pages),
                    self.areas,
                    local_region=self.locals[rank].name,
                    remote_region=self.region.name,
                )
                nbytes = self.transports[rank].write("decode", runs).result()
                self.sent_bytes += nbytes
                self.descriptors += runs.count
                done = session.write_done(action.chunk, runs.count, nbytes)
                yield from self.carry_out(rank, session, done)


def transferred(
    group: Group, logical_pages: LogicalPages, reservation: Reservation, chunk_pages: int
) -> DecodeSession:
    """Send a prompt chunk by chunk from all ranks; returns decode's session at the end."""
    cp_size = len(group.pools)
    receiver = DecodeSession(ROOM, DECODE_EPOCH, PREFILL_EPOCH, cp_size, reservation)
    senders = [
        PrefillSession(ROOM, rank, PREFILL_EPOCH, DECODE_EPOCH, reservation)
        for rank in range(cp_size)
    ]
    covered = 0
    for chunk, start in enumerate(range(0, len(logical_pages), chunk_pages)):
        stop = min(start + chunk_pages, len(logical_pages))
        for rank, sender in enumerate(senders):
            sources, positions = group.layouts[rank].filter_owned_pages(
                LogicalPages(logical_pages[start:stop]),
                Positions(np.arange(start, stop, dtype=np.int64)),
            )
            actions = sender.chunk_ready(chunk, sources, positions, last=stop == len(logical_pages))
            for data in group.carry_out(rank, sender, actions):
                for answer in receiver.receive(decode(data)):
                    covered += isinstance(answer, Covered)
    assert covered == (receiver.state is DecodeState.COVERED)
    return receiver


@pytest.fixture
def decode_pool() -> Iterator[tuple[KVPool, SharedMemoryBuffer]]:
    name = f"cpkv-test-room-{next(_names)}-{id(object()):x}"
    buffer = SharedMemoryBuffer.create(name, SPEC.pool_bytes(DECODE_PAGES))
    buffer.tensor.fill_(POISON)
    yield KVPool(SPEC, DECODE_PAGES, buffer), buffer
    buffer.unlink()


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("pages", "first_position", "chunk_pages"),
    [(1, 0, 1), (3, 0, 8), (13, 0, 4), (13, 5, 4), (13, 13, 13), (9, 8, 3)],
    ids=["one page", "one chunk", "chunked", "prefix held", "all held", "last page only"],
)
def test_decode_holds_the_ranks_bytes_and_nothing_else_has_changed(
    decode_pool: tuple[KVPool, SharedMemoryBuffer],
    cp_size: int,
    pages: int,
    first_position: int,
    chunk_pages: int,
) -> None:
    pool, buffer = decode_pool
    physical_pages = -(-24 // cp_size)
    group = Group(cp_size, physical_pages, buffer)
    rng = np.random.default_rng(pages)
    # As after much allocating and freeing: ids in no order, on either side.
    logical = LogicalPages(rng.permutation(cp_size * physical_pages)[:pages] + 1)
    destinations = PhysicalPages(rng.permutation(DECODE_PAGES)[: pages - first_position] + 1)
    receiver = transferred(group, logical, Reservation(first_position, destinations), chunk_pages)

    assert receiver.state is DecodeState.COVERED
    layout = group.layouts[0]
    owners = layout.owner_for_logical_pages(logical)
    sources = layout.logical_pages_to_physical(logical)
    untouched = sorted(set(range(DECODE_PAGES + 1)) - set(destinations.tolist()))
    kinds: list[PageKind] = ["latent", "index"]
    for kind in kinds:
        for layer in SPEC.layers(kind):
            arrived = pool.pages(kind, layer).numpy()
            for i, destination in enumerate(destinations.tolist()):
                owner = int(owners[first_position + i])
                source = group.pools[owner].pages(kind, layer)[int(sources[first_position + i])]
                np.testing.assert_array_equal(arrived[destination], source.numpy())
            assert (arrived[untouched] == POISON).all()
    assert group.sent_bytes == len(destinations) * SPEC.bytes_per_page


def test_striped_destinations_merge_in_the_whole_path(
    decode_pool: tuple[KVPool, SharedMemoryBuffer],
) -> None:
    group = Group(4, 8, decode_pool[1])
    logical = LogicalPages(np.arange(1, 33, dtype=np.int64))
    free = PhysicalPages(np.arange(1, 33, dtype=np.int64))
    transferred(group, logical, Reservation(0, free), chunk_pages=32)
    assert group.descriptors == 32 * len(AREAS)
    group.descriptors = 0
    striped = stripe_destinations(free, 0, 4)
    receiver = transferred(group, logical, Reservation(0, striped), chunk_pages=32)
    assert receiver.state is DecodeState.COVERED
    assert group.descriptors == 4 * len(AREAS)

"""Transports of GPU memory, beside the contract that all keep: streams, alignment, kinds of memory.

The contract itself: `pytest -m gpu tests/faults/test_transport_contract.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.testing.transport_ends import (
    GPU_KINDS,
    TransportEnds,
    TransportKind,
    in_environment_of,
    why_not,
)
from cp_shared_kv.transfer.mooncake_target import MooncakeTarget

pytestmark = pytest.mark.gpu

NBYTES = 1 << 20
LONG_CYCLES = 300_000_000
"""A sixth of a second."""
MakeEnds = Callable[[TransportKind], TransportEnds]


@pytest.fixture
def make_ends() -> Iterator[MakeEnds]:
    """Makes the one TransportEnds of a test, or skips."""
    kept: list[object] = []

    def make(kind: TransportKind) -> TransportEnds:
        environment = in_environment_of(kind)
        environment.__enter__()
        kept.append(environment)
        if reason := why_not(kind):
            pytest.skip(reason)
        ends = TransportEnds(kind, NBYTES)
        kept.append(ends)
        return ends

    yield make
    for each in reversed(kept):
        each.__exit__(None, None, None)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_a_write_waits_for_what_is_queued_before_it(
    make_ends: MakeEnds, kind: TransportKind
) -> None:
    ends = make_ends(kind)
    peer = ends.peer()
    assert ends.write(peer, ends.all_of_it(peer, 1 << 16)) == NBYTES
    buffer = ends.memory(NBYTES)
    region = ends.transport.register(buffer)
    with torch.cuda.stream(torch.cuda.Stream(buffer.tensor.device)):
        torch.cuda._sleep(LONG_CYCLES)  # pyright: ignore[reportPrivateUsage]
        buffer.tensor.fill_(77)
        runs = replace(ends.all_of_it(peer, 1 << 16), local_region=region.name)
        future = ends.transport.write(peer.info.session_id, runs)
    np.testing.assert_array_equal(peer.memory, ends.source)  # the GPU sleeps: nothing has moved
    assert future.result(30) == NBYTES
    assert (peer.memory == 77).all()


def test_ranges_that_kernels_cannot_copy_are_refused(make_ends: MakeEnds) -> None:
    ends = make_ends("cuda_ipc")
    peer = ends.peer()
    for local, remote, nbytes in [(8, 0, 16), (0, 8, 16), (0, 0, 8)]:
        error = ends.failure(peer, ends.runs(peer, local, remote, nbytes))
        assert (error.kind, error.quiescent) == ("unaligned", True)
    assert not peer.memory.any()


@pytest.mark.parametrize("kind", ["mooncake_gpu_tcp", "mooncake_nvlink"])
def test_memory_that_the_engine_would_mistake_is_refused(
    make_ends: MakeEnds, kind: TransportKind
) -> None:
    ends = make_ends(kind)
    with pytest.raises(TransferError, match=r"region of cpu, not of memory of cuda") as refused:
        ends.transport.register(PrivateBuffer(64))
    assert refused.value.kind == "conflict"
    device = torch.device("cuda", 0)
    target = MooncakeTarget("decode", device=device)
    with pytest.raises(TransferError, match="region of cpu"):
        target.expose(PrivateBuffer(64))
    if kind == "mooncake_nvlink":
        with pytest.raises(TransferError, match="plain cudaMalloc memory"):
            target.expose(PrivateBuffer(64, device))
    target.close()


def test_memory_of_a_killed_peer_is_given_back(make_ends: MakeEnds) -> None:
    """Over NVLink the sender maps it, and the peer's next life needs the room."""
    ends = make_ends("mooncake_nvlink")
    peer = ends.peer()
    assert ends.write(peer, ends.all_of_it(peer, 1 << 16)) == NBYTES
    peer.remove()
    ends.transport.disconnect(peer.info.session_id)
    again = ends.peer()
    assert ends.write(again, ends.all_of_it(again, 1 << 16)) == NBYTES

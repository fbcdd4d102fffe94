"""What a host's transports write to: named once each, and nothing that peers cannot map."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cp_shared_kv.errors import TransferError
from cp_shared_kv.memory.buffers import Buffer, PrivateBuffer, SharedMemoryBuffer
from cp_shared_kv.memory.cuda_ipc import CudaIpcBuffer
from cp_shared_kv.transfer.cuda_ipc import CudaIpcTarget
from cp_shared_kv.transfer.mapped_target import MappedTarget
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.shared_memory import SharedMemoryTarget

NAME = f"cpkv-test-target-{os.getpid()}"


@pytest.fixture(params=["shared_memory", "cuda_ipc"])
def exposed(request: pytest.FixtureRequest) -> Iterator[tuple[MappedTarget, Buffer, Region]]:
    """A target, a buffer that it can expose, and the region that peers are to hear of."""
    if request.param == "shared_memory":
        segment = SharedMemoryBuffer.create(NAME, 64)
        yield SharedMemoryTarget("decode"), segment, Region(NAME, 64)
        segment.unlink()
        return
    buffer = object.__new__(CudaIpcBuffer)  # as it is on a GPU, without one
    buffer._name, buffer.nbytes, buffer.ipc_handle = NAME, 64, bytes(range(64))
    yield CudaIpcTarget("decode"), buffer, Region(NAME, 64, ipc_handle=bytes(range(64)).hex())


def test_a_buffer_is_named_to_peers_once(exposed: tuple[MappedTarget, Buffer, Region]) -> None:
    target, buffer, region = exposed
    assert target.expose(buffer) == region
    with pytest.raises(TransferError, match=f"exposed already: {NAME}") as refused:
        target.expose(buffer)
    assert (refused.value.kind, refused.value.quiescent) == ("conflict", True)
    assert target.regions == (region,)
    assert (target.session_id, target.connections(), target.settled()) == (
        "decode",
        frozenset(),
        True,
    )
    target.close()
    assert target.regions == ()


def test_memory_that_peers_cannot_map_is_refused(
    exposed: tuple[MappedTarget, Buffer, Region],
) -> None:
    target, _, _ = exposed
    with pytest.raises(TransferError, match="cannot map: PrivateBuffer") as refused:
        target.expose(PrivateBuffer(64))
    assert refused.value.kind == "conflict"
    assert target.regions == ()

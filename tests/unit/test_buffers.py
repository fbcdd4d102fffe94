"""Private and shared memory: what a peer sees, what is refused, and what is left behind."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
import torch

from cp_shared_kv.errors import CapacityError, InvariantError, ProtocolError, StartupError
from cp_shared_kv.memory.buffers import Buffer, PrivateBuffer, SharedMemoryBuffer

NBYTES = 3 * 4096 + 5

PEER = """
import sys
from cp_shared_kv.memory.buffers import SharedMemoryBuffer
name, nbytes, index, value = sys.argv[1], *map(int, sys.argv[2:])
peer = SharedMemoryBuffer.attach(name, nbytes)
print(int(peer.tensor[index]))
peer.tensor[index] = value
"""


@pytest.fixture
def name() -> Iterator[str]:
    name = f"cpkv-test-{uuid.uuid4().hex}"
    yield name
    assert not os.path.exists(path(name)), "a test left a segment behind"


@pytest.fixture
def segment(name: str) -> Iterator[SharedMemoryBuffer]:
    segment = SharedMemoryBuffer.create(name, NBYTES)
    yield segment
    segment.unlink()


def path(name: str) -> str:
    return f"/dev/shm/{name}"


def run_peer(name: str, index: int, value: int) -> int:
    """Another process maps the segment, says what it finds, writes, and exits."""
    peer = subprocess.run(
        [sys.executable, "-c", PEER, name, str(NBYTES), str(index), str(value)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert peer.stderr == ""
    return int(peer.stdout)


def test_peer_process_reads_and_writes_the_same_bytes_and_its_exit_leaves_the_segment(
    segment: SharedMemoryBuffer,
) -> None:
    segment.tensor[NBYTES - 1] = 17
    assert run_peer(segment.name, NBYTES - 1, 42) == 17
    assert int(segment.tensor[NBYTES - 1]) == 42
    assert os.path.exists(path(segment.name))


def test_both_kinds_are_zeroed_bytes_that_are_always_the_same_memory(
    segment: SharedMemoryBuffer,
) -> None:
    buffers: list[Buffer] = [PrivateBuffer(NBYTES), segment]
    for buffer in buffers:
        assert buffer.nbytes == NBYTES
        assert (buffer.tensor.dtype, buffer.tensor.shape) == (torch.uint8, (NBYTES,))
        assert not buffer.tensor.any()
        assert buffer.tensor.data_ptr() == buffer.tensor.data_ptr()
    assert buffers[0].name is None


def test_segment_stays_mapped_after_its_name_is_gone(segment: SharedMemoryBuffer) -> None:
    peer = SharedMemoryBuffer.attach(segment.name, NBYTES)
    segment.unlink()
    assert not os.path.exists(path(segment.name))
    peer.tensor[7] = 9
    assert int(segment.tensor[7]) == 9


def test_unlink_twice_does_not_remove_a_later_segment_of_that_name(
    segment: SharedMemoryBuffer,
) -> None:
    segment.unlink()
    later = SharedMemoryBuffer.create(segment.name, NBYTES)
    segment.unlink()
    assert os.path.exists(path(segment.name))
    later.unlink()


def test_closing_leaves_views_valid_and_refuses_further_use(segment: SharedMemoryBuffer) -> None:
    segment.tensor[3] = 5
    view = segment.tensor[2:9]
    segment.close()
    segment.close()
    assert view.tolist() == [0, 5, 0, 0, 0, 0, 0]
    with pytest.raises(InvariantError, match=segment.name):
        _ = segment.tensor


def test_mapping_ends_with_its_last_view(segment: SharedMemoryBuffer) -> None:
    def mapped() -> bool:
        with open("/proc/self/maps") as maps:
            return segment.name in maps.read()

    view = segment.tensor[:1]
    segment.close()
    assert mapped()
    del view
    assert not mapped()


def test_only_this_user_can_open_a_segment_whatever_the_umask(name: str) -> None:
    umask = os.umask(0o777)
    try:
        segment = SharedMemoryBuffer.create(name, NBYTES)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(os.stat(path(name)).st_mode) == 0o600
    segment.unlink()


def test_memory_is_reserved_when_it_is_created(segment: SharedMemoryBuffer) -> None:
    found = os.stat(path(segment.name))
    assert found.st_size == NBYTES
    assert found.st_blocks * 512 >= NBYTES


def test_more_than_fits_is_refused_at_once_with_what_is_wanted_and_free(name: str) -> None:
    space = os.statvfs("/dev/shm")
    too_many = (space.f_blocks + 1) * space.f_frsize
    with pytest.raises(CapacityError, match=rf"{too_many} bytes wanted; allowed: \d+ bytes free"):
        SharedMemoryBuffer.create(name, too_many)


@pytest.mark.parametrize(
    ("total_mib", "advice"), [(64, r"--shm-size.*emptyDir"), (128, "remount,size=")]
)
def test_advice_fits_the_size_of_shared_memory(
    name: str, monkeypatch: pytest.MonkeyPatch, total_mib: int, advice: str
) -> None:
    space = os.statvfs("/dev/shm")
    blocks = (total_mib << 20) // space.f_frsize
    small = os.statvfs_result([*space[:2], blocks, blocks, blocks, *space[5:]])
    too_many = (space.f_blocks + 1) * space.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    with pytest.raises(CapacityError, match=advice):
        SharedMemoryBuffer.create(name, too_many)


def test_taken_name_is_refused_and_its_segment_untouched(segment: SharedMemoryBuffer) -> None:
    segment.tensor[0] = 1
    with pytest.raises(StartupError, match=f"exists already: {path(segment.name)}"):
        SharedMemoryBuffer.create(segment.name, NBYTES)
    assert int(segment.tensor[0]) == 1


@pytest.mark.parametrize("announced", [NBYTES - 1, NBYTES + 1, 1 << 40])
def test_segment_of_another_size_than_announced_is_refused(
    segment: SharedMemoryBuffer, announced: int
) -> None:
    with pytest.raises(ProtocolError, match=f"{NBYTES} bytes; allowed: the {announced} bytes"):
        SharedMemoryBuffer.attach(segment.name, announced)


def test_missing_segment_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match="No such file"):
        SharedMemoryBuffer.attach(name, NBYTES)


def test_link_in_place_of_a_segment_is_refused(name: str, segment: SharedMemoryBuffer) -> None:
    link = f"{name}-link"
    os.symlink(path(name), path(link))
    try:
        with pytest.raises(ProtocolError):
            SharedMemoryBuffer.attach(link, NBYTES)
        with pytest.raises(StartupError):
            SharedMemoryBuffer.create(link, NBYTES)
    finally:
        os.unlink(path(link))


def test_directory_in_place_of_a_segment_is_refused(name: str) -> None:
    os.mkdir(path(name))
    try:
        with pytest.raises(ProtocolError):
            SharedMemoryBuffer.attach(name, NBYTES)
    finally:
        os.rmdir(path(name))


@pytest.mark.parametrize(
    "bad", ["", ".", "..", ".hidden", "a/b", "../etc", "a\0b", "a b", "x" * 201]
)
def test_names_that_are_no_plain_file_are_refused(bad: str) -> None:
    with pytest.raises(ProtocolError, match="shared memory name"):
        SharedMemoryBuffer.create(bad, NBYTES)
    with pytest.raises(ProtocolError, match="shared memory name"):
        SharedMemoryBuffer.attach(bad, NBYTES)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_segments_without_bytes_are_refused(name: str, nbytes: int) -> None:
    with pytest.raises(ProtocolError, match="1 byte or more"):
        SharedMemoryBuffer.create(name, nbytes)
    with pytest.raises(ProtocolError, match="1 byte or more"):
        SharedMemoryBuffer.attach(name, nbytes)

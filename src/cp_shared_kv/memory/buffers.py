"""The memory that holds a pool: private to one process, or shared with its peers on one host.

A shared buffer is a plain file under /dev/shm rather than multiprocessing.shared_memory, whose
resource tracker unlinks a segment when any process that merely attached to it exits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import time
from pathlib import Path
from typing import Protocol, Self

import torch

from cp_shared_kv.errors import CapacityError, InvariantError, ProtocolError, StartupError
from cp_shared_kv.memory.segment_names import SEGMENT_PREFIX, SHARED_MEMORY_DIRECTORY

CONTAINER_DEFAULT_BYTES = 64 << 20
STALE_SECONDS = 60.0
"""A segment younger than this may be one whose maker has not locked it yet."""
NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
_NAME = re.compile(r"[a-zA-Z0-9_-][a-zA-Z0-9._-]{0,199}")


class Buffer(Protocol):
    """A run of bytes that a pool lives in; `name` is None where no peer can map it."""

    @property
    def name(self) -> str | None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def tensor(self) -> torch.Tensor:
        """u8[nbytes], always the same memory; InvariantError after close()."""
        ...

    def close(self) -> None:
        """Give the memory up. Views that are still alive keep it mapped until they go."""
        ...


class PrivateBuffer:
    """`nbytes` zeroed bytes that no other process can see, in host memory or a GPU's."""

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        zeros = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._memory = _Memory(zeros, "private buffer")

    @property
    def name(self) -> None:
        return None

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        return self._memory.tensor

    def close(self) -> None:
        self._memory.release()


class SharedMemoryBuffer:
    """One POSIX shared-memory segment, mapped once. Made by `create` or `attach`.

    No process's exit removes the segment: call unlink() once every peer has mapped it. From then
    on only the mappings keep it alive, so nothing is left behind however the processes end. One
    whose peers come and go keeps its name; if its maker is killed, the name is left to
    `remove_stale_segments`.
    """

    def __init__(self, name: str, mapping: mmap.mmap) -> None:
        self._name = name
        self._linked = True
        # The tensor keeps the mapping object alive, and the mapping ends with it.
        self._memory = _Memory(torch.frombuffer(mapping, dtype=torch.uint8), name)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Self:
        """A new zeroed segment, readable by this user only, with all its memory reserved now.

        Raises CapacityError when it does not fit, StartupError when the name is taken.
        """
        path = _checked_path(name, nbytes)
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise StartupError(
                "shared memory segment exists already",
                value=path,
                change="stop the process that uses it, or remove the file if a killed run left it",
            ) from error
        except OSError as error:
            raise StartupError(
                f"cannot create shared memory ({error.strerror})",
                value=path,
                change=f"make {SHARED_MEMORY_DIRECTORY} a tmpfs that this user can write",
            ) from error
        try:
            os.fchmod(fd, 0o600)  # whatever the umask took away
            # A segment that is only sized dies of SIGBUS later, at the first page without room.
            os.posix_fallocate(fd, 0, nbytes)
            mapping = mmap.mmap(fd, nbytes)
            # Held as long as the mapping: it says that the maker lives.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return cls(name, mapping)
        except BaseException as error:  # an interrupt too must leave nothing behind
            os.unlink(path)
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise shared_memory_shortage(nbytes) from error
            raise
        finally:
            os.close(fd)

    @classmethod
    def attach(cls, name: str, nbytes: int) -> Self:
        """Map a peer's segment. ProtocolError unless it is this user's and of exactly that size."""
        path = _checked_path(name, nbytes)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ProtocolError(
                f"cannot open a peer's shared memory ({error.strerror})",
                value=path,
                change="check that the peer runs, on this host and as this user",
            ) from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise ProtocolError("shared memory segment is not a file of this user", value=path)
            if found.st_size != nbytes:
                raise ProtocolError(
                    f"size of shared memory segment {path}",
                    value=f"{found.st_size} bytes",
                    allowed=f"the {nbytes} bytes that were announced",
                )
            return cls(name, mmap.mmap(fd, nbytes))
        finally:
            os.close(fd)

    @property
    def name(self) -> str:
        return self._name

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        return self._memory.tensor

    def unlink(self) -> None:
        """Remove the name; what is mapped stays valid. Repeating it does nothing."""
        if self._linked:
            self._linked = False  # the name may be someone else's by a second call
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(SHARED_MEMORY_DIRECTORY, self._name))

    def close(self) -> None:
        self._memory.release()


class _Memory:
    """A tensor that can be let go of; views of it that are still in use keep its bytes alive."""

    def __init__(self, tensor: torch.Tensor, label: str) -> None:
        self.nbytes = tensor.numel()
        self._label = label
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise InvariantError("buffer used after close()", value=self._label)
        return self._tensor

    def release(self) -> None:
        self._tensor = None


def remove_stale_segments() -> list[str]:
    """Remove this user's named segments whose makers are gone; returns their names.

    A process that still maps one keeps its memory. Safe beside running clusters.
    """
    removed: list[str] = []
    for path in Path(SHARED_MEMORY_DIRECTORY).glob(f"{SEGMENT_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                found = os.fstat(fd)
                old = time.time() - found.st_ctime > STALE_SECONDS
                if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and old:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    removed.append(path.name)
            finally:
                os.close(fd)
    return removed


def _checked_path(name: str, nbytes: int) -> str:
    if not _NAME.fullmatch(name):
        raise ProtocolError(
            "shared memory name",
            value=repr(name[:80]),
            allowed="1 to 200 of a-z A-Z 0-9 . _ -, not starting with a dot",
        )
    if nbytes < 1:
        raise ProtocolError("shared memory size", value=nbytes, allowed="1 byte or more")
    return os.path.join(SHARED_MEMORY_DIRECTORY, name)


def shared_memory_shortage(nbytes: int) -> CapacityError:
    """The error for `nbytes` that do not fit: what is free, and how to get more of it."""
    space = os.statvfs(SHARED_MEMORY_DIRECTORY)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    change = "lower --max-total-tokens, or remove segments that killed runs left"
    if total == CONTAINER_DEFAULT_BYTES:
        change = (
            "this is a container's default of 64 MB: start it with "
            f"--shm-size={-(-nbytes // 2**20) + 64}m or --ipc=host (in Kubernetes mount an "
            "emptyDir with medium: Memory there), or lower --max-total-tokens"
        )
    elif total < nbytes:
        change = (
            f"enlarge it: mount -o remount,size=... {SHARED_MEMORY_DIRECTORY}, "
            "or lower --max-total-tokens"
        )
    return CapacityError(
        f"too little shared memory in {SHARED_MEMORY_DIRECTORY}",
        value=f"{nbytes} bytes wanted",
        allowed=f"{free} bytes free of {total}",
        change=change,
    )

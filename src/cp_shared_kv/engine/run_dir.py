"""The private directory of a run's sockets and files, and what killed runs left of theirs."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from cp_shared_kv.errors import StartupError

PREFIX = "cpkv-"
HELD_FILE = "held"
"""Locked as long as the run lives; the kernel unlocks it, however the run ends."""
MAX_IPC_PATH_BYTES = 107


class RunDir:
    """Makes one (mode 0700) and holds it; removes those of this user that nobody holds any more.

    StartupError where none can be made or its path is too long, with nothing left.
    """

    def __init__(self) -> None:
        remove_stale_run_dirs()
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        except OSError as error:
            raise StartupError(
                f"cannot make the run's directory: {error}",
                change="set TMPDIR to a writable directory",
            ) from error
        try:
            _check_length(self.path)
            self._held_fd = _hold(self.path)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Remove it with all that is in it. Again: no effect."""
        if self._held_fd is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._held_fd)
            self._held_fd = None


def remove_stale_run_dirs() -> list[Path]:
    """Remove this user's run directories whose runs are gone; returns them.

    Safe beside running clusters and beside others that do the same.
    """
    removed: list[Path] = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is not ours, is none, is held, or has just been removed
            if path.lstat().st_uid != os.geteuid() or path.is_symlink():
                continue
            held_fd = os.open(path / HELD_FILE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(held_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
                removed.append(path)
            finally:
                os.close(held_fd)
    return removed


def _check_length(path: Path) -> None:
    longest = len(str(path)) + len("/prefill-9999.999999999.sock")
    if longest > MAX_IPC_PATH_BYTES:
        raise StartupError(
            "the temporary directory's path is too long for sockets",
            value=f"{longest} bytes",
            allowed=f"{MAX_IPC_PATH_BYTES} bytes, with the run's name",
            change="set TMPDIR to a shorter path",
        )


def _hold(path: Path) -> int:
    """Lock the file that says that the run lives; returns its descriptor."""
    made = path / f"{HELD_FILE}.new"
    fd = os.open(made, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        made.rename(path / HELD_FILE)  # locked before it has the name that others look for
    except BaseException:
        os.close(fd)
        raise
    return fd

"""The private directory of a run's sockets and files."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cp_shared_kv.errors import StartupError

MAX_IPC_PATH_BYTES = 107


def make_run_dir() -> Path:
    """Make one (mode 0700). StartupError where none can be made or its path is too long."""
    try:
        run_dir = Path(tempfile.mkdtemp(prefix="cpkv-"))
    except OSError as error:
        raise StartupError(
            f"cannot make the run's directory: {error}", change="set TMPDIR to a writable directory"
        ) from error
    longest = len(str(run_dir)) + len("/prefill-9999.999999999.sock")
    if longest > MAX_IPC_PATH_BYTES:
        run_dir.rmdir()
        raise StartupError(
            "the temporary directory's path is too long for sockets",
            value=f"{longest} bytes",
            allowed=f"{MAX_IPC_PATH_BYTES} bytes, with the run's name",
            change="set TMPDIR to a shorter path",
        )
    return run_dir

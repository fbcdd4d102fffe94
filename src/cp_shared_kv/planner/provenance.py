"""What a file of results must say to be repeated: commit, versions, machine."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cp_shared_kv._version import __version__

_PACKAGES = ("numpy", "msgspec", "matplotlib")


def provenance() -> dict[str, Any]:
    """Of this process. The commit is None where the package does not lie in a checkout."""
    return {
        "recorded_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": _changed(),
        "versions": {
            "python": platform.python_version(),
            "cp-shared-kv": __version__,
            **{package: _version(package) for package in _PACKAGES},
        },
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores_usable": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
            # Above the number of cores, others took part of the time.
            "load_average_1min": round(os.getloadavg()[0], 2),
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _changed() -> bool | None:
    changes = _git("status", "--porcelain", "--", "src/cp_shared_kv")
    return None if changes is None else bool(changes)


def _git(*arguments: str) -> str | None:
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():  # not some other repository that this one is installed in
        return None
    try:
        done = subprocess.run(  # noqa: S603  (fixed arguments)
            ["git", "-C", str(root), *arguments],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

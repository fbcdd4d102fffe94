"""What `--model-path demo` means: a model that is kept in the user's cache folder, made once."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from safetensors import SafetensorError

from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import is_whole, make_tiny_checkpoint
from cp_shared_kv.errors import ConfigError

DEMO_MODEL = "demo"
# Raise it with any change of what is written, so that no older cached directory is taken.
_DEMO_VERSION = 2
_DEMO_SEED = 0


def model_directory(model_path: Path) -> Path:
    """The demo model's directory for `demo`, unless there is such a path here; else the path."""
    if str(model_path) != DEMO_MODEL or model_path.exists():
        return model_path
    return demo_checkpoint_directory()


def demo_checkpoint_directory() -> Path:
    """The demo model in the user's cache folder, made at first use and again when damaged.

    The folder is $XDG_CACHE_HOME/cp-shared-kv, or ~/.cache/cp-shared-kv. Processes may call this
    at the same time. ConfigError where no file can be kept there.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return _demo_in(cache / "cp-shared-kv")
    # RuntimeError: a user without a home. SafetensorError: a full disk, among others.
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ConfigError(
            "the demo model cannot be kept in the cache folder",
            value=error,
            change="set XDG_CACHE_HOME to a directory that this user can make, or write to",
        ) from error


def _demo_in(cache: Path) -> Path:
    directory = cache / f"demo-deepseek-v32-v{_DEMO_VERSION}-seed{_DEMO_SEED}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{directory.name}.lock").open("w") as lock:
        # Until the file is closed no other process replaces what this one has found whole.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_whole(directory):
            make_tiny_checkpoint(directory, ModelShape(), _DEMO_SEED)
    return directory

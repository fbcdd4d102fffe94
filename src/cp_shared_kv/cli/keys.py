"""`cpkv keys`: the keys with which hosts of one cluster know each other."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from cp_shared_kv.engine.control_keys import ControlKeys


def keys(directory: Path, /) -> int:
    """Make the keys of a cluster whose processes are on several hosts.

    Copy the directory to each host, by a way that nobody can listen to; `cpkv serve` and `cpkv
    join` take it as `--control-keys`. Whoever can read it can join. Keys that exist are never
    replaced.

    Parameters
    ----------
    directory:
        Where to keep them; made if it does not exist, for this user alone.
    """
    file = ControlKeys.create(directory)
    Console(stderr=True).print(
        f"cpkv: wrote {file}; whoever can read it can join the cluster",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return 0

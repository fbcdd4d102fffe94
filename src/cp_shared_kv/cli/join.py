"""`cpkv join`: decode workers on this host for a run on another."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from cp_shared_kv.cli.stop_signals import on_stop_signals
from cp_shared_kv.engine.join_config import JoinConfig
from cp_shared_kv.engine.open_files import raise_open_files_limit


def join(
    address: str,
    /,
    *,
    control_keys: Path,
    control_host: str,
    decode_workers: int = 1,
    model_path: Path | None = None,
) -> int:
    """Run decode workers on this host for a `cpkv serve` on another one.

    That one was started with --control-host, the same keys and the mooncake backend; all other
    settings are its own. Ends when that run ends, or by Ctrl-C or SIGTERM, after which its requests
    go to other decode workers. When the connection is lost the workers start afresh.

    Parameters
    ----------
    address:
        HOST:PORT of the run, as `cpkv serve` shows it.
    control_keys:
        Directory with the keys of the cluster, a copy of the run's.
    control_host:
        IPv4 address of this host at which the run's host reaches it.
    decode_workers:
        How many to run, each with weights and a pool of its own.
    model_path:
        The run's model on this host; by default it lies where the run has it.
    """
    config = JoinConfig(
        address=address,
        control_keys=control_keys,
        control_host=control_host,
        decode_workers=decode_workers,
        model_path=model_path,
    )
    stopped = threading.Event()
    on_stop_signals(stopped.set)
    # Imported here: help and a refused flag need not wait for torch.
    from cp_shared_kv.demo_model.cache import model_directory
    from cp_shared_kv.engine.satellite import Satellite

    if model_path is not None:
        config = replace(config, model_path=model_directory(model_path))
    raise_open_files_limit()

    console = Console(stderr=True, soft_wrap=True, highlight=False)

    def say(text: str) -> None:
        console.print(f"cpkv: {text}", markup=False)

    satellite = Satellite(
        config,
        stopped,
        joined=lambda units: say(f"joined {address} with {', '.join(units)}  (Ctrl-C leaves)"),
    )
    ended = satellite.run()
    with suppress(OSError):  # the terminal may be what has gone
        say(f"the run at {address} has ended" if ended == "run over" else f"left {address}")
    return 0

"""`cpkv serve`: the OpenAI-compatible server over a whole cluster of processes."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Annotated, NoReturn

from cyclopts import Parameter
from rich.console import Console

from cp_shared_kv.cli.stop_signals import on_stop_signals
from cp_shared_kv.engine.api_key import with_api_key
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.open_files import raise_open_files_limit
from cp_shared_kv.errors import StartStoppedError, StartupError
from cp_shared_kv.server.serve import open_listener

WATCH_SECONDS = 0.2


def with_model(config: EngineConfig) -> EngineConfig:
    """The config with `--model-path demo` replaced by the built-in demo model's directory."""
    from cp_shared_kv.demo_model.cache import model_directory

    directory = model_directory(config.model_path)
    if directory == config.model_path:
        return config
    return replace(config, model_path=directory, served_model_name=config.model_name)


def serve(config: Annotated[EngineConfig, Parameter(name="*")]) -> int:
    """Serve a model: prefill groups, decode workers and an OpenAI-compatible HTTP server.

    `--model-path demo` serves a tiny built-in model, made on first use. Four ranks that share
    one pool:

    ```
    cpkv serve --model-path demo \\
        --attention-context-parallel-size 4 \\
        --enable-nsa-prefill-context-parallel \\
        --enable-nsa-prefill-cp-shared-kv \\
        --max-total-tokens 4096
    ```
    """
    stopped, hurry = threading.Event(), threading.Event()
    console = Console(stderr=True)

    def cut_off() -> NoReturn:
        stopped.set()  # should something on the way swallow the exception
        raise KeyboardInterrupt

    # As long as no process runs nothing looks at the event, and a file may never end.
    on_stop_signals(cut_off)
    with ExitStack() as stack:
        try:
            # Imported here: help and a refused flag need not wait for torch.
            from cp_shared_kv.engine.cluster import Cluster

            raise_open_files_limit()
            config = with_api_key(with_model(config), os.environ)
            listener = open_listener(config.host, config.port)
            with console.status("starting processes ..."):
                cluster = Cluster(config, listener=listener, stop_asked=stopped)
                on_stop_signals(lambda: (hurry if stopped.is_set() else stopped).set())
                stack.enter_context(cluster)
        except (KeyboardInterrupt, StartStoppedError):
            return 0
        host, port = listener.getsockname()[:2]
        listener.close()  # the server's process has it
        console.print(
            f"cpkv: serving {config.model_name} at http://{host}:{port}/v1  (Ctrl-C stops)",
            markup=False,
            highlight=False,
        )
        if cluster.join_address is not None:
            console.print(
                f"cpkv: decode workers on other hosts can join at {cluster.join_address}",
                markup=False,
                highlight=False,
            )
        while not stopped.wait(WATCH_SECONDS):
            if cluster.fatal is not None:
                raise StartupError(f"{cluster.fatal}; the cluster stops")
        with suppress(OSError):  # the terminal may be what has gone
            console.print("cpkv: stopping; answers under way may end (Ctrl-C again: at once)")
        cluster.drain(hurry)
    return 0

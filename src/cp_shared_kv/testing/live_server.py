"""A real server in this process, on a loopback port, over an engine of a test's own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cp_shared_kv.engine.api import EngineDescription
from cp_shared_kv.server.app import create_app
from cp_shared_kv.server.drain import Gate
from cp_shared_kv.server.engine_client import EngineClient
from cp_shared_kv.server.serve import open_listener, serve
from cp_shared_kv.server.tokenizer import Tokenizer


@dataclass
class LiveServer:
    """A server in a thread of its own. `stop` returns once it is down."""

    url: str
    port: int
    stop: Callable[[], None]


def start_server(
    engine: EngineClient,
    tokenizer: Tokenizer,
    description: EngineDescription,
    drain_seconds: int = 5,
    gate: Gate | None = None,
    **app_options: Any,
) -> LiveServer:
    """Returns once the server can be reached. `app_options` are those of `create_app`."""
    gate = gate or Gate()
    listener = open_listener("127.0.0.1", 0)
    port = listener.getsockname()[1]
    ready = threading.Event()
    stops: list[Callable[[], object]] = []

    async def main() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        stops.append(lambda: loop.call_soon_threadsafe(stop.set))
        app = create_app(engine, tokenizer, description, gate=gate, **app_options)
        await serve(
            app,
            listener,
            lambda _url: ready.set(),
            stop=stop,
            gate=gate,
            drain_seconds=drain_seconds,
        )

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(10)

    def stop() -> None:
        if thread.is_alive():
            stops[0]()
            thread.join(20)
        assert not thread.is_alive()

    return LiveServer(f"http://127.0.0.1:{port}", port, stop)

"""The application on a socket, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
from collections.abc import Callable, Generator

import uvicorn
from starlette.applications import Starlette

from cp_shared_kv.errors import StartupError
from cp_shared_kv.server.connections import connection_limits
from cp_shared_kv.server.drain import Gate
from cp_shared_kv.server.patience import PatientProtocol

DRAIN_SECONDS = 5
"""How long answers under way may go on after the server was told to stop."""
_FLUSH_SECONDS = 1
"""For the last bytes of answers that have just ended."""
_ABORT_SECONDS = 2.0
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that they close them and not the server: a
request sent on a connection that is just being closed is lost."""


def open_listener(host: str, port: int) -> socket.socket:
    """A socket bound to the address, for `serve`; port 0 picks a free one.

    To call before the engine starts, so that a taken port is known at once. Connections are
    refused until the server is ready. Raises `StartupError` when the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:  # the second where it cannot be a name either
        why = error.strerror if isinstance(error, OSError) else error
        raise StartupError(
            f"--host is not an address ({why})",
            value=host,
            change="give an address of this machine, such as 127.0.0.1 or 0.0.0.0",
        ) from None
    listener = socket.socket(family, kind, protocol)
    try:
        # A restart must not wait for the last server's connections to time out.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(error, host, port) from None
    return listener


async def serve(
    app: Starlette,
    listener: socket.socket,
    on_ready: Callable[[str], None] | None = None,
    *,
    stop: asyncio.Event | None = None,
    gate: Gate | None = None,
    drain_seconds: float = DRAIN_SECONDS,
) -> None:
    """Serve until told to stop, then let answers under way end, and return.

    Meanwhile `gate`, which is the app's, keeps new ones out: connections are still taken, and told
    to go elsewhere.

    `listener` comes from `open_listener` and is closed at the end. `on_ready` gets the server's
    URL once requests are taken. Without `stop` the signals INT and TERM stop the server (a second
    one at once); with it the caller does, and signals are left alone. Answers that take longer
    than `drain_seconds` then are cut off with an error, and their requests aborted.

    Raises `StartupError` when another process has come to listen on the address.
    """
    host, port = listener.getsockname()[:2]
    most_connections, backlog = connection_limits()
    try:
        # Two processes can bind the same port before either listens.
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise _cannot_listen(error, host, port) from None
    url = f"http://{_for_url(host)}:{port}"
    config = uvicorn.Config(
        app,
        http=type("Protocol", (PatientProtocol,), {"most_connections": most_connections}),
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=backlog,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )
    server = _Server(config, (lambda: on_ready(url)) if on_ready else lambda: None)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        hurry = asyncio.Event()
        if stop is None:
            stop = asyncio.Event()
            stack.enter_context(_set_by_signals(stop, hurry))
        end = asyncio.ensure_future(_end(server, gate or Gate(), stop, hurry, drain_seconds))
        stack.callback(end.cancel)
        await server.serve(sockets=[listener])
        # What was cut off still has to tell the engine so.
        if server.server_state.tasks:
            await asyncio.wait(set(server.server_state.tasks), timeout=_ABORT_SECONDS)


class _Server(uvicorn.Server):
    """Uvicorn that says when it is ready, and leaves the process's signals to `serve`: its own
    way is to raise them again at the end, which would end the process before its engine is down."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def _end(
    server: uvicorn.Server,
    gate: Gate,
    stop: asyncio.Event,
    hurry: asyncio.Event,
    drain_seconds: float,
) -> None:
    await stop.wait()
    gate.closed = True
    waits = [asyncio.ensure_future(gate.drained()), asyncio.ensure_future(hurry.wait())]
    await asyncio.wait(waits, timeout=drain_seconds, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    server.force_exit = hurry.is_set()
    server.should_exit = True


@contextlib.contextmanager
def _set_by_signals(stop: asyncio.Event, hurry: asyncio.Event) -> Generator[None]:
    """The first signal sets `stop`, the second `hurry`."""

    def told() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, told)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def _cannot_listen(error: OSError, host: str, port: int) -> StartupError:
    where = f"{_for_url(host)}:{port}"
    match error.errno:
        case errno.EADDRINUSE:
            return StartupError(
                "the port is in use",
                value=where,
                change="stop the process that listens there, or choose another --port (0 picks "
                "a free one)",
            )
        case errno.EACCES:
            return StartupError(
                "the port needs privileges",
                value=where,
                change="choose a --port of 1024 or more",
            )
        case errno.EADDRNOTAVAIL:
            return StartupError(
                "--host is not an address of this machine",
                value=where,
                change="choose another --host, such as 127.0.0.1 or 0.0.0.0",
            )
        case _:
            return StartupError(f"cannot listen ({error.strerror})", value=where)


def _for_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host

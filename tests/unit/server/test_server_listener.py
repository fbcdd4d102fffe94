"""Taking an address, and stopping by signal."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from cp_shared_kv.errors import StartupError
from cp_shared_kv.server.serve import open_listener, serve


def test_a_port_in_use_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError) as caught:
            open_listener("127.0.0.1", port)
    message = str(caught.value)
    assert "the port is in use" in message
    assert f"127.0.0.1:{port}" in message
    assert "--port" in message
    assert "\n" not in message


def test_a_port_that_another_came_to_listen_on_meanwhile():
    first = open_listener("127.0.0.1", 0)
    second = open_listener("127.0.0.1", first.getsockname()[1])
    first.listen()
    with pytest.raises(StartupError, match="in use"):
        asyncio.run(serve(Starlette(), second))
    assert second.fileno() == -1
    first.close()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("203.0.113.7", "not an address of this machine"),
        ("no such host", "not an address"),
        ("a" * 70, "not an address .*: a{70}; to change it: "),
        ("ü..x", "not an address"),
        ("\udcff", "not an address"),
    ],
)
def test_an_address_that_is_not_ours(host, words):
    with pytest.raises(StartupError, match=words):
        open_listener(host, 0)


def test_a_free_port_is_picked_and_told():
    listener = open_listener("127.0.0.1", 0)
    told: list[str] = []

    async def main() -> None:
        stop = asyncio.Event()

        def on_ready(url: str) -> None:
            told.append(url)
            stop.set()

        await serve(Starlette(), listener, on_ready, stop=stop)

    port = listener.getsockname()[1]
    asyncio.run(main())
    assert told == [f"http://127.0.0.1:{port}"]
    assert listener.fileno() == -1


def test_ipv6_addresses_are_bracketed():
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        listener = open_listener("::1", 0)
    except StartupError:
        pytest.skip("no IPv6 loopback here")
    with listener:
        listener.listen()
        with pytest.raises(StartupError, match=r"\[::1\]:"):
            open_listener("::1", listener.getsockname()[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_the_server_and_it_returns(number):
    async def main() -> None:
        async def page(_request):
            raise AssertionError

        app = Starlette(routes=[Route("/", page)])
        await serve(app, open_listener("127.0.0.1", 0), lambda _: os.kill(os.getpid(), number))

    before = signal.getsignal(signal.SIGTERM)
    asyncio.run(main())
    assert signal.getsignal(signal.SIGTERM) == before


def test_connections_are_refused_until_the_server_is_ready():
    with open_listener("127.0.0.1", 0) as listener, pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{listener.getsockname()[1]}/health")

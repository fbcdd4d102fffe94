"""A server that was told to stop: no new answers, those under way end, nobody waits for ever."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import httpx
import pytest
from starlette.applications import Starlette

from cp_shared_kv.server.chat_template import ChatTemplate
from cp_shared_kv.server.drain import Gate
from cp_shared_kv.server.serve import open_listener, serve

BODY = {"model": "fake-model", "prompt": "x"}
CHAT = {"model": "fake-model", "messages": [{"role": "user", "content": "x"}]}
ASKING = {"/v1/completions": BODY, "/v1/chat/completions": CHAT, "/generate": {"text": "x"}}


@pytest.fixture(params=ASKING)
def draining(own_server, request):
    """A server that was told to stop while one stream is under way, which `release` lets go on."""
    gate = Gate()
    server, engine = own_server(gate=gate, chat_template=ChatTemplate("{{ messages[0].content }}"))
    engine.stall_after_tokens = 2
    lines: list[str] = []

    def read() -> None:
        body = ASKING[request.param] | {"stream": True}
        with httpx.stream("POST", server.url + request.param, json=body, timeout=20) as stream:
            lines.extend(stream.iter_lines())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert engine.started.wait(10)
    time.sleep(0.1)
    stopping = threading.Thread(target=server.stop, daemon=True)
    stopping.start()
    deadline = time.monotonic() + 10
    while not gate.closed:
        assert time.monotonic() < deadline
        time.sleep(0.01)

    def release() -> list[str]:
        engine.release()
        reader.join(10)
        return lines

    yield server, engine, release
    stopping.join(20)


def test_new_requests_are_sent_elsewhere_and_the_old_one_ends(draining):
    server, engine, release = draining
    for path, body in ASKING.items():
        response = httpx.post(server.url + path, json=body)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.headers["connection"] == "close"
        assert response.json()["error"]["code"] == "unavailable"
    health = httpx.get(f"{server.url}/health")
    assert (health.status_code, health.json()["reason"]) == (503, "the server is stopping")
    assert release()[-2:] == ["data: [DONE]", ""]
    assert engine.aborted == []
    assert len(engine.requests) == 1


def test_without_answers_under_way_a_server_stops_at_once(own_server):
    server, _ = own_server(drain_seconds=60)
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 5


def test_a_second_signal_waits_for_nobody():
    gate = Gate()
    gate.enter()

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def later(_url: str) -> None:
            for seconds in (0.05, 0.3):
                loop.call_later(seconds, os.kill, os.getpid(), signal.SIGINT)

        await serve(Starlette(), open_listener("127.0.0.1", 0), later, gate=gate, drain_seconds=60)

    started = time.monotonic()
    asyncio.run(main())
    assert 0.3 <= time.monotonic() - started < 10

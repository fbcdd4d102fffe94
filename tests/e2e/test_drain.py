"""`cpkv serve` told to stop while it answers: what is under way ends, if there is time for it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.e2e

CPKV = str(Path(sys.executable).with_name("cpkv"))
START_SECONDS = 60
# Beside --shutdown-timeout: last words, aborts, and processes that end.
STOP_SECONDS = 15


@dataclass
class Served:
    """A running `cpkv serve`."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    path: str = "/v1/completions"

    def post(self, max_tokens: int, *, stream: bool = False) -> httpx.Response:
        """Ask for exactly so many tokens."""
        body = request(self.path, max_tokens, stream)
        return httpx.post(self.url + self.path, json=body, trust_env=False, timeout=90)

    def usage(self) -> dict[str, Any]:
        return httpx.get(f"{self.url}/server_info", trust_env=False).json()["usage"]

    def stop(self) -> None:
        """SIGTERM; returns once the server has heard of it."""
        self.process.send_signal(signal.SIGTERM)
        until(lambda: self.health() == (503, "the server is stopping"))

    def health(self) -> tuple[int, str]:
        response = httpx.get(f"{self.url}/health", trust_env=False)
        return response.status_code, response.json().get("reason", "")


def request(path: str, max_tokens: int, stream: bool) -> dict[str, Any]:
    """What `path` is to be asked for so many tokens."""
    text = f"answer with {max_tokens} tokens"
    if path == "/generate":
        sampling = {"max_new_tokens": max_tokens, "ignore_eos": True}
        return {"text": text, "sampling_params": sampling, "stream": stream}
    body: dict[str, Any] = {"model": "demo", "max_tokens": max_tokens, "ignore_eos": True}
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def answered_tokens(body: dict[str, Any]) -> int:
    """Output tokens that an answer, or the end of a stream, counts."""
    usage = body.get("usage") or body["meta_info"]
    return usage["completion_tokens"]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def served(directory: Path, *, shutdown_timeout: int, answer_tokens: int) -> Iterator[Served]:
    """`cpkv serve` on two ranks, where decode has room for two such answers; killed if a test
    leaves it running."""
    log = directory / "serve.log"
    flags = [
        "--model-path=demo",
        "--attention-context-parallel-size=2",
        "--enable-nsa-prefill-context-parallel",
        "--enable-nsa-prefill-cp-shared-kv",
        "--max-total-tokens=1024",
        f"--decode-max-total-tokens={2 * (answer_tokens + 128)}",
        f"--shutdown-timeout={shutdown_timeout}",
        "--port=0",
    ]
    with log.open("wb") as stderr:
        process = subprocess.Popen([CPKV, "serve", *flags], stderr=stderr)
    try:
        until(lambda: "serving demo at " in log.read_text() or process.poll() is not None)
        url = re.search(r"serving demo at (http://\S+)/v1", log.read_text())
        assert url is not None, log.read_text()
        yield Served(process, url[1], log)
    finally:
        process.kill()  # its children end with it
        process.wait()


def answers_under_way(
    server: Served, clients: Executor, tokens: int
) -> list[Future[httpx.Response]]:
    """A stream and a whole answer that are being decoded, and a whole one that waits for them."""
    decoding = [clients.submit(server.post, tokens, stream=stream) for stream in (True, False)]
    until(lambda: server.usage()["decode_requests"] == 2)
    waiting = clients.submit(server.post, tokens)
    until(lambda: server.usage()["decode_queued_requests"] == 1)
    return [*decoding, waiting]


def events(stream: httpx.Response) -> list[str]:
    assert stream.status_code == 200
    return [line[6:] for line in stream.text.splitlines() if line.startswith("data: ")]


def assert_refused(response: httpx.Response) -> None:
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert_stopping(response.json())


def assert_stopping(body: dict[str, Any]) -> None:
    error = body["error"]
    assert (error["message"], error["code"]) == ("the server is stopping", "unavailable")


def assert_ended_well(server: Served, seconds: float) -> None:
    assert server.process.wait(seconds) == 0
    log = server.log.read_text()
    assert "cpkv: stopping" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_what_is_under_way_or_queued_is_answered_in_full_and_nothing_new(
    tmp_path: Path, path: str
) -> None:
    with (
        served(tmp_path, shutdown_timeout=60, answer_tokens=400) as server,
        ThreadPoolExecutor(3) as clients,
    ):
        server.path = path
        answers = answers_under_way(server, clients, 400)
        server.stop()
        assert_refused(server.post(1))
        assert_refused(server.post(1, stream=True))
        stream, *whole = [answer.result() for answer in answers]
        *_, last, done = events(stream)
        assert done == "[DONE]"
        for body in (json.loads(last), *(answer.json() for answer in whole)):
            assert answered_tokens(body) == 400
        # As soon as the last answer is there, long before the time is up.
        assert_ended_well(server, STOP_SECONDS)


def test_answers_that_take_longer_are_cut_off_with_an_error(tmp_path: Path) -> None:
    with (
        served(tmp_path, shutdown_timeout=1, answer_tokens=8000) as server,
        ThreadPoolExecutor(3) as clients,
    ):
        answers = answers_under_way(server, clients, 8000)
        server.stop()
        assert_ended_well(server, 1 + STOP_SECONDS)
        stream, *whole = [answer.result() for answer in answers]
        *told, last = events(stream)
        assert told
        assert_stopping(json.loads(last))
        for answer in whole:
            assert_refused(answer)

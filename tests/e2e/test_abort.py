"""A request ended at each of its stages, by its client and by /abort_request: its pages come back
everywhere, and the request behind it is answered as if it were alone.

Deadlines at these stages: test_overload.py. Between the last chunk and the first output token, and
aborts from prefill's or decode's side: tests/unit/test_engine_decode_failures.py,
test_engine_prefill_aborts.py, and every order of events in tests/property/test_decode_machine.py.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from cp_shared_kv.testing.client_load import body
from cp_shared_kv.testing.running_cluster import CP_SIZE, PHYSICAL_TOKENS, Running, small_config
from cp_shared_kv.testing.running_cluster import running as start_cluster

pytestmark = pytest.mark.e2e

LOGICAL_TOKENS = CP_SIZE * PHYSICAL_TOKENS
DECODE_TOKENS = 8192
NEIGHBOUR = body("the neighbour asks something of its own " * 3, 24)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Little room at decode, many small batches for a prompt, and nothing cached: what a request
    does, it does each time."""
    config = small_config(
        decode_max_total_tokens=DECODE_TOKENS, chunked_prefill_size=16, disable_radix_cache=True
    )
    with start_cluster(config, tmp_path_factory.mktemp("abort") / "cluster.log") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def alone(small: Running) -> str:
    return small.post(NEIGHBOUR).json()["choices"][0]["text"]


def asking(tokens: int, max_tokens: int, **extra: Any) -> dict[str, Any]:
    """A request with a prompt of exactly so many tokens; a byte is one."""
    return body(f"{next(_numbers)} ".ljust(tokens, "."), max_tokens) | extra


@dataclass
class Asked:
    """A request on a connection of its own, which the test may close."""

    connection: socket.socket
    stream: bool

    @classmethod
    def of(cls, served: Running, fields: dict[str, Any]) -> Asked:
        url = httpx.URL(served.url)
        connection = socket.create_connection((url.host, url.port), timeout=60)
        data = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
        connection.sendall(f"{head}Connection: close\r\n\r\n".encode() + data)
        return cls(connection, bool(fields.get("stream")))

    def leave(self) -> None:
        self.connection.close()

    def answer(self) -> tuple[int, list[dict[str, Any]]]:
        """The status, and the answer's one object or all events of its stream."""
        received = bytearray()
        while part := self.connection.recv(1 << 16):
            received += part
        self.connection.close()
        head, _, rest = bytes(received).partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if not self.stream or status != 200:
            return status, [json.loads(rest)]
        *events, done = [line[6:] for line in rest.splitlines() if line.startswith(b"data: ")]
        assert done == b"[DONE]"
        return status, [json.loads(event) for event in events]


@contextmanager
def asked(served: Running, fields: dict[str, Any]) -> Iterator[Asked]:
    """A request whose client goes away at the end, if it has not before."""
    request = Asked.of(served, fields)
    try:
        yield request
    finally:
        request.leave()


# Each stage: what comes before the request, the request, and how one knows that it is there.


@contextmanager
def waiting_at_decode(served: Running, **extra: Any) -> Iterator[Asked]:
    """Offered, and decode has no pages for it."""
    with asked(served, asking(100, DECODE_TOKENS - 100)):
        served.until(decode_used_tokens=DECODE_TOKENS, decode_requests=1)
        with asked(served, asking(200, 50, **extra)) as request:
            served.until(queued_requests=1, decode_queued_requests=1)
            yield request


@contextmanager
def waiting_at_prefill(served: Running, **extra: Any) -> Iterator[Asked]:
    """Decode has set pages aside, and prefill's pool is full of another prompt."""
    with asked(served, asking(LOGICAL_TOKENS - 64, 1)):
        served.until(prefill_requests=1)
        with asked(served, asking(200, 50, **extra)) as request:
            served.until(queued_requests=1, decode_queued_requests=0)
            yield request


@contextmanager
def in_prefill(served: Running, **extra: Any) -> Iterator[Asked]:
    """One of the first of its 120 chunks is being computed; pages are set aside at both ends."""
    with asked(served, asking(LOGICAL_TOKENS - 128, 1, **extra)) as request:
        usage = served.until(prefill_requests=1)
        assert usage["used_tokens"] > 0
        assert usage["decode_used_tokens"] > 0
        yield request


@contextmanager
def decoding(served: Running, **extra: Any) -> Iterator[Asked]:
    """Output tokens come."""
    with asked(served, asking(200, 6000, **extra)) as request:
        served.until(decode_requests=1)
        yield request


STAGES = {
    "waiting at decode": waiting_at_decode,
    "waiting at prefill": waiting_at_prefill,
    "in prefill": in_prefill,
    "decoding": decoding,
}


def assert_neighbour_is_answered(neighbour: Asked, alone: str) -> None:
    status, (answer,) = neighbour.answer()
    assert status == 200
    assert answer["choices"][0]["text"] == alone
    assert answer["usage"]["completion_tokens"] == NEIGHBOUR["max_tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_client_goes_away(small: Running, alone: str, stage: str, stream: bool) -> None:
    with ExitStack() as others:
        request = others.enter_context(STAGES[stage](small, stream=stream))
        neighbour = Asked.of(small, NEIGHBOUR)
        request.leave()
        if stage == "waiting at decode":
            small.until(queued_requests=1)  # the neighbour; what fills decode goes on
            others.close()
        assert_neighbour_is_answered(neighbour, alone)
    small.until_nothing_is_held()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_request_is_aborted_over_http(
    small: Running, alone: str, stage: str, stream: bool
) -> None:
    with ExitStack() as others:
        request = others.enter_context(STAGES[stage](small, stream=stream, rid="victim"))
        neighbour = Asked.of(small, NEIGHBOUR)
        told = httpx.post(f"{small.url}/abort_request", json={"rid": "victim"}, trust_env=False)
        assert (told.status_code, told.json()) == (200, {"aborted_requests": 1})
        status, answers = request.answer()
        others.close()
        assert_neighbour_is_answered(neighbour, alone)
    assert status == 200
    assert answers[-1]["choices"][0]["finish_reason"] == "abort"
    text = "".join(answer["choices"][0]["text"] for answer in answers)
    assert bool(text) == (stage == "decoding")
    small.until_nothing_is_held()


def test_its_time_runs_out_while_prefill_has_no_room(small: Running, alone: str) -> None:
    with waiting_at_prefill(small, timeout=0.4) as request:
        neighbour = Asked.of(small, NEIGHBOUR)
        status, (answer,) = request.answer()
        assert_neighbour_is_answered(neighbour, alone)
    assert (status, answer["error"]["code"]) == (504, "timeout")
    small.until_nothing_is_held()


def test_all_are_aborted_at_once_at_whatever_stage(small: Running, alone: str) -> None:
    with ExitStack() as several:
        requests = [several.enter_context(asked(small, asking(300, 900))) for _ in range(12)]
        small.until(decode_queued_requests=6)
        told = httpx.post(f"{small.url}/abort_request", json={"abort_all": True}, trust_env=False)
        assert told.json() == {"aborted_requests": 12}
        for request in requests:
            status, (answer,) = request.answer()
            assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
    small.until_nothing_is_held()
    assert small.post(NEIGHBOUR).json()["choices"][0]["text"] == alone
    told = httpx.post(f"{small.url}/abort_request", json={"rid": "nobody"}, trust_env=False)
    assert (told.status_code, told.json()) == (200, {"aborted_requests": 0})

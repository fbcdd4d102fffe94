"""More requests than the cluster can hold: they wait, are refused, or run out of time, and nothing
of them stays behind.

Decode has room for one request of `DECODE_TOKENS`, or for two of half of it. A request reserves
pages for all of its max_tokens, however early it ends, so few requests fill decode for long.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from cp_shared_kv.testing.running_cluster import CP_SIZE, PHYSICAL_TOKENS, Running, small_config
from cp_shared_kv.testing.running_cluster import running as start_cluster

pytestmark = pytest.mark.e2e

PAGE_SIZE = 64
LOGICAL_TOKENS = CP_SIZE * PHYSICAL_TOKENS
DECODE_TOKENS = 8192
MAX_QUEUED = 12
WAIT_SECONDS = 60
LETTER = ord("A")  # the demo model's tokens are bytes
Answer = Future[httpx.Response]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A cluster with little room at decode, whose prefill takes many small batches for a prompt."""
    config = small_config(
        decode_max_total_tokens=DECODE_TOKENS,
        max_queued_requests=MAX_QUEUED,
        chunked_prefill_size=16,
    )
    with start_cluster(config, tmp_path_factory.mktemp("overload") / "cluster.log") as cluster:
        yield cluster


def asking(tokens: int, start: str, max_tokens: int, **extra: Any) -> dict[str, Any]:
    """A request with a prompt of so many tokens that no other prompt begins like."""
    prompt = f"{start} ".ljust(tokens, ".")
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    } | extra


def totals(served: Running) -> dict[str, Any]:
    return served.get("/server_info").json()["totals"]


@contextmanager
def decode_is_full(served: Running) -> Iterator[Iterator[str]]:
    """One request has all of decode until the block ends, where its client goes away. Yields the
    events that it still gets."""
    body = asking(128, "all of decode", DECODE_TOKENS - 128, stream=True)
    with (
        httpx.Client(trust_env=False, timeout=WAIT_SECONDS) as client,
        client.stream("POST", f"{served.url}/v1/completions", json=body) as response,
    ):
        events = (line for line in response.iter_lines() if line)
        assert next(events).startswith("data: ")
        served.until(used_tokens=0, decode_used_tokens=DECODE_TOKENS, decode_requests=1)
        yield events


def everything(served: Running, bodies: list[dict[str, Any]], clients: Executor) -> list[Answer]:
    """Send all requests at once; returns their answers to come."""
    return [clients.submit(served.post, body) for body in bodies]


def output_tokens(answer: Answer) -> int:
    response = answer.result()
    assert response.status_code == 200, response.text
    return response.json()["usage"]["completion_tokens"]


def test_while_decode_is_full_prefill_computes_nothing_and_holds_no_page(small: Running) -> None:
    bodies = [asking(400, f"held back {i}", 4) for i in range(8)]
    with ThreadPoolExecutor(8) as clients:
        with decode_is_full(small) as events:
            before = totals(small)["prompt_tokens"]
            answers = everything(small, bodies, clients)
            small.until(queued_requests=8, decode_queued_requests=8)
            for _ in range(10):
                assert next(events).startswith("data: ")  # decode itself goes on
                usage = small.usage()
                assert usage["decode_used_tokens"] == DECODE_TOKENS
                assert usage["used_tokens"] == usage["prefill_requests"] == 0
                assert usage["queued_requests"] == 8
            assert totals(small)["prompt_tokens"] == before
            assert small.get("/v1/loads").json()["aggregate"]["total_waiting_reqs"] == 8
            assert not any(answer.done() for answer in answers)
        assert [output_tokens(answer) for answer in answers] == [4] * 8
    small.until_nothing_is_held()


def test_prefill_holds_no_more_than_the_requests_that_decode_has_room_for(small: Running) -> None:
    at_decode, page_tokens = 2, 5 * PAGE_SIZE
    # Half of decode for each, though a token that always wins ends it after 40.
    ending = {"min_tokens": 40, "stop_token_ids": [LETTER], "logit_bias": {LETTER: 100}}
    bodies = [
        asking(300, f"many {i}", DECODE_TOKENS // at_decode - 300, **ending) for i in range(12)
    ]
    held: list[int] = []
    with ThreadPoolExecutor(12) as clients:
        answers = everything(small, bodies, clients)
        while not all(answer.done() for answer in answers):
            usage = small.usage()
            assert usage["decode_used_tokens"] <= DECODE_TOKENS
            held.append(usage["used_tokens"])
        assert [output_tokens(answer) for answer in answers] == [41] * 12
    # A room may be over at decode before each rank has said so at prefill: twice as many, never
    # the 6 that prefill's own pool would take.
    assert 0 < max(held) <= 2 * at_decode * page_tokens < LOGICAL_TOKENS - page_tokens
    small.until_nothing_is_held()


def test_a_full_queue_answers_503_and_those_in_it_are_served(small: Running) -> None:
    bodies = [asking(70, f"in the queue {i}", 3) for i in range(MAX_QUEUED)]
    with ThreadPoolExecutor(MAX_QUEUED) as clients:
        with decode_is_full(small):
            answers = everything(small, bodies, clients)
            small.until(queued_requests=MAX_QUEUED)
            for stream in (False, True):
                refused = small.post(asking(70, "too many", 3, stream=stream))
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) >= 1
                error = refused.json()["error"]
                assert (error["type"], error["code"]) == ("server_error", "overloaded")
                assert "--max-queued-requests" in error["message"]
            assert small.get("/health").status_code == 200
            assert small.usage()["queued_requests"] == MAX_QUEUED
        assert [output_tokens(answer) for answer in answers] == [3] * MAX_QUEUED
    assert small.post(asking(70, "afterwards", 3)).status_code == 200
    small.until_nothing_is_held()


def assert_ran_out_of_time(status: int, error: dict[str, Any], timeout: float) -> None:
    assert status == 504
    assert (error["type"], error["param"], error["code"]) == ("server_error", "timeout", "timeout")
    assert f"timeout of {timeout:g} s" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_time_runs_out_in_the_queue_leaves_it(small: Running, stream: bool) -> None:
    with decode_is_full(small) as events:
        before = totals(small)["prompt_tokens"]
        answer = small.post(asking(500, "out of time", 4, stream=stream, timeout=0.3))
        assert_ran_out_of_time(answer.status_code, answer.json()["error"], 0.3)
        small.until(queued_requests=0, decode_queued_requests=0, used_tokens=0)
        assert totals(small)["prompt_tokens"] == before
        assert next(events).startswith("data: ")  # its neighbour has not noticed
    small.until_nothing_is_held()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_time_runs_out_in_prefill_gives_its_pages_back(
    small: Running, stream: bool
) -> None:
    started = time.monotonic()
    assert small.post(asking(1900, f"in time, {stream}", 1)).status_code == 200
    a_third = round((time.monotonic() - started) / 3, 3)
    before = totals(small)
    answer = small.post(asking(1900, f"too late, {stream}", 1, stream=stream, timeout=a_third))
    assert_ran_out_of_time(answer.status_code, answer.json()["error"], a_third)
    small.until_nothing_is_held()
    after = totals(small)
    assert after["prompt_tokens"] - before["prompt_tokens"] == 1900  # it was being computed
    assert after["generated_tokens"] == before["generated_tokens"]


def test_a_request_whose_time_runs_out_while_decoding_gives_its_pages_back(small: Running) -> None:
    before = totals(small)["generated_tokens"]
    answer = small.post(asking(100, "whole", 6000, timeout=0.8))
    assert_ran_out_of_time(answer.status_code, answer.json()["error"], 0.8)
    small.until_nothing_is_held()
    assert totals(small)["generated_tokens"] > before


def test_a_stream_whose_time_runs_out_ends_with_an_error_event(small: Running) -> None:
    answer = small.post(asking(100, "stream", 6000, timeout=0.8, stream=True))
    assert answer.status_code == 200
    *events, last = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert all("choices" in json.loads(event) for event in events)
    assert len(events) > 1
    assert_ran_out_of_time(504, json.loads(last)["error"], 0.8)
    small.until_nothing_is_held()

"""Each kind of process killed, and stopped, at random moments under load.

What may fail: the requests that the lost process held, each with a reason. What may not: the
server's port, requests that were still queued, the neighbours, a page, the next answer.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from cp_shared_kv.testing.client_load import CLIENTS, Load, body, under_load
from cp_shared_kv.testing.running_cluster import Running

pytestmark = pytest.mark.e2e

UNITS = {
    "prefill-0/rank-0": "prefill-0",
    "prefill-0/rank-1": "prefill-0",
    "prefill-0": "prefill-0",
    "decode-0": "decode-0",
    "server-0": "server-0",
}
PROBE = "the probe: what does a cold run alone answer? " * 12
REASONS = ("killed by SIGKILL", "gave no sign of life", "has not ended on all ranks")


def life_of(served: Running, unit: str) -> int:
    return served.cluster.life(unit).number


def await_next_life(served: Running, unit: str, life: int) -> None:
    served.await_lost(unit, life)
    served.await_ready(unit, life + 1)


def assert_all_is_well(served: Running, expected: str) -> None:
    """The next answer equals a cold run alone, and every page is back."""
    deadline = time.monotonic() + 60
    while served.get("/health").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    answer = served.post(body(PROBE, 8))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == expected
    for _ in range(200):
        usage = served.usage()
        if usage["used_tokens"] == usage["decode_used_tokens"] == 0:
            break
        time.sleep(0.05)
    assert usage["used_tokens"] == usage["decode_used_tokens"] == 0, usage
    capacity = served.get("/server_info").json()["max_total_num_tokens"]
    assert usage["available_tokens"] + usage["evictable_tokens"] == capacity
    assert usage["queued_requests"] == usage["prefill_requests"] == usage["decode_requests"] == 0
    books = served.get("/debug/invariants")
    assert books.status_code == 200, books.text
    assert served.cluster.fatal is None


@pytest.fixture(scope="module")
def expected(struck: Running) -> str:
    """The probe's answer from a cold cluster, alone."""
    return struck.post(body(PROBE, 8)).json()["choices"][0]["text"]


def strike(struck: Running, expected: str, process: str, seed: int) -> Load:
    """Kill a process at a random moment under load; returns what the clients saw."""
    unit = UNITS[process]
    life = life_of(struck, unit)
    others = {other: life_of(struck, other) for other in set(UNITS.values()) - {unit}}
    with under_load(struck, seed) as load:
        time.sleep(0.2 + random.Random(seed).random())
        os.kill(struck.cluster.pid(process), signal.SIGKILL)
        await_next_life(struck, unit, life)
        time.sleep(0.3)
    assert_all_is_well(struck, expected)
    assert others == {other: life_of(struck, other) for other in others}, "others began again"
    return load


@pytest.mark.parametrize("process", UNITS)
def test_a_killed_process_fails_only_what_it_held(
    struck: Running, expected: str, process: str
) -> None:
    load = strike(struck, expected, process, seed=1)
    assert load.answered > 0
    # Each client has one request at a time, and a retry may meet the same gap.
    assert len(load.failed) <= CLIENTS
    for failure in load.failed:
        assert failure.startswith("5"), failure
        assert any(reason in failure for reason in REASONS), failure
    if process != "server-0":
        assert load.cut == 0
    if UNITS[process] == "prefill-0":
        assert load.failed == []  # none of its requests had had output: they began again


@pytest.mark.soak
def test_fifty_kills(struck: Running, expected: str) -> None:
    for seed in range(50):
        process = random.Random(seed).choice(list(UNITS))
        strike(struck, expected, process, seed)


@pytest.mark.parametrize("process", ["prefill-0/rank-1", "prefill-0", "decode-0"])
def test_a_process_that_stops_for_a_while_loses_nothing(
    struck: Running, expected: str, process: str
) -> None:
    life = life_of(struck, UNITS[process])
    with under_load(struck, seed=2) as load:
        time.sleep(0.3)
        pid = struck.cluster.pid(process)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)
    assert load.failed == []
    assert load.cut == 0
    assert life_of(struck, UNITS[process]) == life
    assert_all_is_well(struck, expected)


@pytest.mark.parametrize("process", ["prefill-0/rank-1", "prefill-0", "decode-0", "server-0"])
def test_a_process_that_hangs_is_killed_by_the_watchdog(
    struck: Running, expected: str, process: str
) -> None:
    """A stopped rank is a collective that hangs: the controller's watchdog sees its batch."""
    unit = UNITS[process]
    life = life_of(struck, unit)
    with under_load(struck, seed=3) as load:
        time.sleep(0.3)
        os.kill(struck.cluster.pid(process), signal.SIGSTOP)
        await_next_life(struck, unit, life)
    for failure in load.failed:
        assert any(reason in failure for reason in REASONS), failure
    assert_all_is_well(struck, expected)


def test_a_request_that_waits_while_its_group_is_away_is_answered(
    struck: Running, expected: str
) -> None:
    life = life_of(struck, "prefill-0")
    os.kill(struck.cluster.pid("prefill-0"), signal.SIGKILL)
    struck.await_lost("prefill-0", life)
    while struck.get("/health").status_code == 200:
        time.sleep(0.02)
    answer = struck.post(body(PROBE, 8))
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == expected
    struck.await_ready("prefill-0", life + 1)


def test_health_says_why_it_is_red(struck: Running, expected: str) -> None:
    life = life_of(struck, "decode-0")
    os.kill(struck.cluster.pid("decode-0"), signal.SIGKILL)
    struck.await_lost("decode-0", life)
    red = struck.get("/health")
    while red.status_code == 200:
        time.sleep(0.02)
        red = struck.get("/health")
    assert red.status_code == 503
    assert "decode-0 was killed by SIGKILL" in red.text
    struck.await_ready("decode-0", life + 1)
    assert_all_is_well(struck, expected)

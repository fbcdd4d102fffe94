"""The whole engine over Mooncake's Transfer Engine: the same answers, and what a kill costs."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator

import pytest

from cp_shared_kv.testing.client_load import body, under_load
from cp_shared_kv.testing.running_cluster import Running, running, small_config

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("mooncake") is None,
        reason="mooncake-transfer-engine-non-cuda has no wheel for this Python",
    ),
]


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log_file = tmp_path_factory.mktemp("mooncake") / "cluster.log"
    config = small_config(disaggregation_transfer_backend="mooncake", verify_kv_transfer=True)
    with running(config, log_file) as cluster:
        yield cluster


def test_the_answers_are_those_of_shared_memory(served: Running, mooncake: Running) -> None:
    for number in range(3):
        question = body(f"question {number}: " + "which way do pages go? " * 40, 12)
        answers = [c.post(question).json()["choices"][0]["text"] for c in (served, mooncake)]
        assert answers[0] == answers[1]
    sent = sum(rank["sent_pages"] for rank in mooncake.get("/server_info").json()["ranks"])
    assert sent > 0


@pytest.mark.parametrize("process", ["prefill-0/rank-1", "decode-0"])
def test_a_killed_end_fails_what_it_held_and_comes_back(mooncake: Running, process: str) -> None:
    question = body("who comes back? " * 40, 8)
    expected = mooncake.post(question).json()["choices"][0]["text"]
    unit = process.partition("/")[0]
    life = mooncake.cluster.life(unit).number
    with under_load(mooncake, seed=5) as load:
        while load.answered < 6:
            pass
        os.kill(mooncake.cluster.pid(process), signal.SIGKILL)
        mooncake.await_lost(unit, life)
        mooncake.await_ready(unit, life + 1)
    # A rank may find the peer gone before the supervisor says so.
    reasons = ("killed by SIGKILL", "peer does not answer")
    assert all(any(r in failure for r in reasons) for failure in load.failed), load.failed
    assert mooncake.post(question).json()["choices"][0]["text"] == expected
    assert mooncake.get("/debug/invariants").json()["balanced"]
    usage = mooncake.usage()
    assert usage["used_tokens"] == usage["decode_used_tokens"] == 0

"""The engine on GPUs over Mooncake: pages arrive as they were sent, whatever carries them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from cp_shared_kv.kernels.needs import missing_for_gpus
from cp_shared_kv.testing.running_cluster import Running, running, small_config
from cp_shared_kv.testing.transport_ends import TransportKind, in_environment_of, why_not

pytestmark = pytest.mark.gpu

KINDS: tuple[TransportKind, ...] = ("mooncake_gpu_tcp", "mooncake_nvlink")
PROMPTS = ["short", "which way do pages go? " * 40, "which way do pages go? " * 40 + "and then?"]


def body(prompt: str) -> dict[str, object]:
    return {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": 12,
        "ignore_eos": True,
        "temperature": 0,
    }


def texts(served: Running) -> list[str]:
    replies = [served.post(body(prompt)) for prompt in PROMPTS]
    for reply in replies:
        reply.raise_for_status()
    return [reply.json()["choices"][0]["text"] for reply in replies]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the engine answers over memory that both ends have mapped."""
    if missing := missing_for_gpus(2):
        pytest.skip(missing)
    log_file = tmp_path_factory.mktemp("mapped") / "cluster.log"
    with running(small_config(device="cuda"), log_file) as served:
        return texts(served)


@pytest.fixture(scope="module", params=KINDS)
def over_mooncake(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """A cluster that compares at decode the checksums of all pages that arrive."""
    if missing := missing_for_gpus(2):
        pytest.skip(missing)
    with in_environment_of(request.param):
        if reason := why_not(request.param):
            pytest.skip(reason)
        config = small_config(
            device="cuda", disaggregation_transfer_backend="mooncake", verify_kv_transfer=True
        )
        log_file = tmp_path_factory.mktemp(request.param) / "cluster.log"
        with running(config, log_file) as served:
            yield served


def test_the_answers_are_those_of_mapped_memory(
    over_mooncake: Running, expected: list[str]
) -> None:
    assert texts(over_mooncake) == expected
    ranks = over_mooncake.get("/server_info").json()["ranks"]
    assert all(rank["sent_pages"] > 0 for rank in ranks), ranks
    over_mooncake.until_nothing_is_held()


@pytest.mark.parametrize("process", ["decode-0", "prefill-0/rank-1"])
def test_a_killed_end_comes_back(over_mooncake: Running, expected: list[str], process: str) -> None:
    unit = process.partition("/")[0]
    life = over_mooncake.cluster.life(unit).number
    os.kill(over_mooncake.cluster.pid(process), signal.SIGKILL)
    over_mooncake.await_lost(unit, life)
    over_mooncake.await_ready(unit, life + 1)
    assert texts(over_mooncake) == expected
    over_mooncake.until_nothing_is_held()

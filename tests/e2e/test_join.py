"""A decode worker that joins from another host: 127.0.0.1 and 127.0.0.2 stand for the two.

For this code they are two hosts: other addresses, encrypted links, and nothing is taken from what
the kernel that they share could tell.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.testing.client_load import body, under_load
from cp_shared_kv.testing.running_cluster import Running, running, small_config
from cp_shared_kv.testing.satellite_process import (
    CPKV,
    SatelliteProcess,
    answers,
    pairs,
    until,
    workers,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("mooncake") is None,
        reason="mooncake-transfer-engine-non-cuda has no wheel for this Python",
    ),
]

GUEST = "decode-1"


def guests(main: Running) -> set[str]:
    """The units of other hosts whose books the server can ask for."""
    return {
        unit
        for unit in main.get("/debug/invariants").json()["problems"]
        if unit.startswith("decode-") and unit != "decode-0"
    }


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cluster") / "keys"
    ControlKeys.create(directory)
    return directory


@pytest.fixture(scope="module")
def main(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = small_config(
        disaggregation_transfer_backend="mooncake",
        router_policy="round_robin",
        control_host="127.0.0.1",
        control_port=0,
        control_keys=keys,
        verify_kv_transfer=True,
    )
    with running(config, tmp_path_factory.mktemp("main") / "cluster.log") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def local(main: Running) -> list[str]:
    """The answers of the run by itself, before anybody joined."""
    assert workers(main) == 1
    return answers(main, 4)


@pytest.fixture(scope="module")
def joined(
    main: Running, keys: Path, local: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SatelliteProcess]:
    """In the order of this file, each test leaves it as it found it, but the last ones."""
    satellite = SatelliteProcess(
        main, keys, tmp_path_factory.mktemp("satellite") / "log", "127.0.0.2"
    )
    until(lambda: satellite.says(f"joined {main.cluster.join_address} with {GUEST}"), "joined")
    until(lambda: pairs(main, GUEST) == 1, "paired")
    yield satellite
    satellite.end()


def test_the_answers_are_those_of_the_run_by_itself(
    main: Running, local: list[str], joined: SatelliteProcess
) -> None:
    main.flush_cache()
    assert answers(main, 4) == local
    assert main.get("/debug/invariants").json()["balanced"]


def test_half_of_the_requests_go_to_the_other_host(main: Running, joined: SatelliteProcess) -> None:
    """While its worker is stopped they wait; it loses nothing by that."""
    os.kill(joined.worker(), signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(main.post, body(f"{n} waits " * 30, 8)) for n in range(2)]
        until(lambda: any(future.done() for future in asked), "one is answered here")
        time.sleep(1.0)
        assert sum(future.done() for future in asked) == 1
        os.kill(joined.worker(), signal.SIGCONT)
        assert [future.result().status_code for future in asked] == [200, 200]


def test_a_killed_worker_comes_back_by_its_satellite(
    main: Running, local: list[str], joined: SatelliteProcess
) -> None:
    before = pairs(main, GUEST)
    with under_load(main, seed=3) as load:
        until(lambda: load.answered >= 6, "some answers")
        os.kill(joined.worker(), signal.SIGKILL)
        until(lambda: joined.says(f"{GUEST} is back"), "the worker is back")
        until(lambda: pairs(main, GUEST) > before, "paired again")
    reasons = ("killed by SIGKILL", "peer does not answer", "peer has gone")
    assert all(any(r in failure for r in reasons) for failure in load.failed), load.failed
    assert load.cut == 0
    assert answers(main, 4) == local
    main.until_nothing_is_held()


def test_a_group_that_is_lost_comes_back_for_the_other_host_too(
    main: Running, local: list[str], joined: SatelliteProcess
) -> None:
    life, before = main.cluster.life("prefill-0").number, pairs(main, GUEST)
    with under_load(main, seed=4) as load:
        until(lambda: load.answered >= 6, "some answers")
        os.kill(main.cluster.pid("prefill-0/rank-1"), signal.SIGKILL)
        main.await_lost("prefill-0", life)
        main.await_ready("prefill-0", life + 1)
    assert all("killed by SIGKILL" in failure for failure in load.failed), load.failed
    until(lambda: pairs(main, GUEST) > before, "paired again")
    assert answers(main, 4) == local
    main.until_nothing_is_held()
    assert not joined.says("could not go on")


def test_a_server_that_is_lost_is_found_again(
    main: Running, local: list[str], joined: SatelliteProcess
) -> None:
    life = main.cluster.life("server-0").number
    os.kill(main.cluster.pid("server-0"), signal.SIGKILL)
    main.await_lost("server-0", life)
    main.await_ready("server-0", life + 1)

    def both_answer() -> bool:
        try:
            return workers(main) == 2
        except (httpx.TransportError, StopIteration):
            return False

    until(both_answer, "both decode workers answer the next server")
    assert answers(main, 4) == local


def test_a_killed_satellite_takes_its_worker_along_and_the_rest_goes_on(
    main: Running, local: list[str], joined: SatelliteProcess
) -> None:
    worker = joined.worker()
    with under_load(main, seed=5) as load:
        until(lambda: load.answered >= 6, "some answers")
        joined.process.kill()
        joined.process.wait()
        until(lambda: workers(main) == 1, "the guest counts as gone")
    reasons = ("went with its satellite at 127.0.0.2", "peer does not answer", "peer has gone")
    assert all(any(r in failure for r in reasons) for failure in load.failed), load.failed
    until(lambda: not Path(f"/proc/{worker}").exists(), "the worker is gone")
    assert main.get("/health").status_code == 200
    assert answers(main, 4) == local
    main.until_nothing_is_held()
    assert guests(main) == set()


def test_strangers_at_the_door_harm_nobody(main: Running, local: list[str], tmp_path: Path) -> None:
    ControlKeys.create(tmp_path / "other")
    ended = subprocess.run(
        [
            *(CPKV, "join", str(main.cluster.join_address), "--control-host=127.0.0.2"),
            f"--control-keys={tmp_path / 'other'}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "answers with these keys" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert answers(main, 4) == local


def test_satellites_end_by_a_signal_or_with_their_run(
    main: Running, keys: Path, tmp_path: Path
) -> None:
    """The last test: it stops the run."""
    satellites = [
        SatelliteProcess(main, keys, tmp_path / f"log {n}", "127.0.0.2") for n in range(2)
    ]
    try:
        for satellite in satellites:
            until(lambda s=satellite: s.says("joined 127.0.0.1:"), "joined")
        # Other names than the one before, whose words nobody is to take for theirs.
        until(lambda: guests(main) == {"decode-2", "decode-3"}, "both are there")
        first, second = satellites
        first.process.terminate()
        assert first.process.wait(20) == 0
        assert "left 127.0.0.1:" in first.log.read_text()
        until(lambda: len(guests(main)) == 1, "one is left")
        main.cluster.stop()
        assert second.process.wait(20) == 0
        assert "has ended" in second.log.read_text()
    finally:
        for satellite in satellites:
            satellite.end()

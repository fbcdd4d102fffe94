"""A satellite in a network of its own, whose link to the run goes down and comes back."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.testing.running_cluster import running, small_config
from cp_shared_kv.testing.satellite_process import (
    SatelliteProcess,
    answers,
    pairs,
    until,
    workers,
)

HERE, THERE = "10.213.77.1", "10.213.77.2"
NAMESPACE, NEAR_END, FAR_END = "cpkv-test", "cpkv-near", "cpkv-far"


def ip(*arguments: str) -> int:
    return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode


def may_make_networks() -> bool:
    try:
        return ip("netns", "add", NAMESPACE) == 0 and ip("netns", "del", NAMESPACE) == 0
    except FileNotFoundError:
        return False


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.soak,
    pytest.mark.skipif(
        importlib.util.find_spec("mooncake") is None,
        reason="mooncake-transfer-engine-non-cuda has no wheel for this Python",
    ),
    pytest.mark.skipif(not may_make_networks(), reason="this user may not make a network"),
]


@pytest.fixture
def network() -> Iterator[None]:
    """Two hosts, as far as the network goes."""
    for command in (
        f"netns add {NAMESPACE}",
        f"link add {NEAR_END} type veth peer name {FAR_END} netns {NAMESPACE}",
        f"addr add {HERE}/24 dev {NEAR_END}",
        f"link set {NEAR_END} up",
        f"-n {NAMESPACE} addr add {THERE}/24 dev {FAR_END}",
        f"-n {NAMESPACE} link set {FAR_END} up",
        f"-n {NAMESPACE} link set lo up",
    ):
        assert ip(*command.split()) == 0, command
    yield
    ip("link", "del", NEAR_END)
    ip("netns", "del", NAMESPACE)


@pytest.mark.usefixtures("network")
def test_a_link_that_goes_down_costs_no_answer_and_a_satellite_that_finds_it_again_joins_again(
    tmp_path: Path,
) -> None:
    keys = tmp_path / "keys"
    ControlKeys.create(keys)
    config = small_config(
        disaggregation_transfer_backend="mooncake",
        router_policy="round_robin",
        control_host=HERE,
        control_port=0,
        control_keys=keys,
    )
    with running(config, tmp_path / "cluster.log") as main:
        local = answers(main, 4)
        enter = ["ip", "netns", "exec", NAMESPACE]
        satellite = SatelliteProcess(main, keys, tmp_path / "log", THERE, enter)
        try:
            until(lambda: pairs(main, "decode-1") == 1, "paired")
            assert answers(main, 4) == local
            assert ip("-n", NAMESPACE, "link", "set", FAR_END, "down") == 0
            assert answers(main, 4) == local  # half of them after the loss is noticed
            until(lambda: workers(main) == 1, "the guest counts as gone")
            until(lambda: satellite.says("joining again"), "the satellite has noticed")
            assert ip("-n", NAMESPACE, "link", "set", FAR_END, "up") == 0
            until(lambda: pairs(main, "decode-2") == 1, "paired under another name")
            assert answers(main, 4) == local
            assert main.get("/debug/invariants").json()["balanced"]
        finally:
            satellite.end()

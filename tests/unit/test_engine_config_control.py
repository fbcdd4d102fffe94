"""Links to other hosts in the config: without keys that nobody else can read there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.control_keys import FILE_NAME, ControlKeys
from cp_shared_kv.errors import ConfigError


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    ControlKeys.create(tmp_path / "keys")
    return tmp_path / "keys"


def config(keys: Path | None, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "model_path": Path("/models/tiny"),
        "disaggregation_transfer_backend": "mooncake",
        "control_host": "10.0.0.5",
        "control_keys": keys,
    }
    return EngineConfig(**(values | changes))


def refusal(keys: Path | None, **changes: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        config(keys, **changes)
    return str(refused.value)


def test_a_run_with_keys_may_listen_and_says_so_to_its_children(keys: Path) -> None:
    made = config(keys, control_port=0)
    assert EngineConfig.from_plain(made.as_plain()) == made


def test_no_host_is_let_in_without_keys() -> None:
    assert "cpkv keys" in refusal(None)


def test_keys_that_others_can_read_are_refused(keys: Path) -> None:
    (keys / FILE_NAME).chmod(0o644)
    assert "chmod 600" in refusal(keys)


def test_keys_that_do_not_exist_are_refused(keys: Path) -> None:
    assert "there are no keys" in refusal(keys / "nowhere")


def test_shared_memory_does_not_leave_a_host(keys: Path) -> None:
    told = refusal(keys, disaggregation_transfer_backend="shared_memory")
    assert "allowed: mooncake" in told


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "224.0.0.1", "", "localhost", "::1", "10.0.0.5:1", "10.0.0.256", "*"]
)
def test_an_address_that_nobody_could_connect_to_is_refused(keys: Path, host: str) -> None:
    assert "--control-host" in refusal(keys, control_host=host)


def test_what_only_serves_other_hosts_is_refused_without_them(keys: Path) -> None:
    assert "--control-host" in refusal(keys, control_host=None)
    assert "--control-host" in refusal(None, control_host=None, control_port=4000)
    assert "--control-port" in refusal(keys, control_port=70_000)


def test_a_recording_is_of_one_host(keys: Path, tmp_path: Path) -> None:
    assert "--record-batches" in refusal(keys, record_batches=tmp_path)


def test_workers_of_other_hosts_run_on_cpus(keys: Path) -> None:
    assert "CPUs only so far: --device cuda; allowed: --device cpu" in refusal(keys, device="cuda")

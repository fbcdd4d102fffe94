"""What stands between the project and Mooncake's wheel; the wheel itself is not needed here."""

from __future__ import annotations

import importlib.abc
import os
import sys
import threading
from types import ModuleType

import pytest

from cp_shared_kv.errors import StartupError
from cp_shared_kv.transfer import mooncake
from cp_shared_kv.transfer.mooncake import MooncakeEngine
from cp_shared_kv.transfer.mooncake_settings import (
    FORBIDDEN_SETTINGS,
    FORCE_TCP,
    NVLINK,
    REQUIRED_SETTINGS,
)


class FakeWheel(ModuleType):
    """`mooncake.engine` with an engine that does as it is told, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__("mooncake.engine")
        self.batch = 1234
        self.statuses: list[int] = []
        self.asked: list[int] = []
        self.start_status = 0
        self.SUPPORT_CUDA: bool = True
        self.SUPPORT_INTRA_NVLINK: bool = True
        wheel = self

        class TransferEngine:
            def initialize(self, *arguments: str) -> int:
                return wheel.start_status

            def get_rpc_port(self) -> int:
                return 15001

            def transfer_submit_write(self, *arguments: object) -> int:
                return wheel.batch

            def batch_transfer_async_read(self, *arguments: object) -> int:
                return wheel.batch

            def transfer_check_status(self, batch: int) -> int:
                wheel.asked.append(batch)
                return wheel.statuses.pop(0)

        self.TransferEngine = TransferEngine


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of Mooncake's, and none left behind."""
    for name in [*os.environ]:
        if name.startswith("MC_"):
            monkeypatch.delenv(name)
    for name in (*REQUIRED_SETTINGS, "MC_LOG_LEVEL"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> FakeWheel:
    fake = FakeWheel()
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", fake)
    return fake


def test_without_the_wheel_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(StartupError, match=r"pip install 'cp-shared-kv\[mooncake\]'"):
        MooncakeEngine("127.0.0.1")


@pytest.mark.parametrize(
    ("library", "remedy"),
    [
        ("libibverbs.so.1", "apt install libibverbs1"),
        ("libnuma.so.1", "apt install libnuma1"),
        ("libother.so.7", "install the system library libother.so.7"),
        ("libcudart.so.12", "another build of the same package"),
    ],
)
def test_without_a_system_library_the_error_says_which_and_where_from(
    monkeypatch: pytest.MonkeyPatch, library: str, remedy: str
) -> None:
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *arguments: object) -> None:
            if name.split(".")[0] == "mooncake":
                raise ImportError(f"{library}: cannot open shared object file")

    for name in [name for name in sys.modules if name.split(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(StartupError) as refused:
        MooncakeEngine("127.0.0.1")
    assert library in str(refused.value)
    assert remedy in str(refused.value)


def test_an_engine_that_does_not_start_is_an_error(wheel: FakeWheel) -> None:
    wheel.start_status = -1
    with pytest.raises(StartupError, match=r"status -1 on 127\.0\.0\.1"):
        MooncakeEngine("127.0.0.1")


@pytest.mark.parametrize("name", REQUIRED_SETTINGS)
def test_a_setting_that_is_relied_on_cannot_be_another(
    wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "3")
    with pytest.raises(StartupError, match=f"{name}: 3; allowed: {REQUIRED_SETTINGS[name]}"):
        MooncakeEngine("127.0.0.1")
    monkeypatch.setenv(name, REQUIRED_SETTINGS[name])
    MooncakeEngine("127.0.0.1")
    assert {key: os.environ[key] for key in REQUIRED_SETTINGS} == dict(REQUIRED_SETTINGS)


@pytest.mark.parametrize("name", FORBIDDEN_SETTINGS)
def test_a_setting_that_breaks_promises_is_refused(
    wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(StartupError, match=f"unset {name}"):
        MooncakeEngine("127.0.0.1")


def test_tcp_is_forced_for_gpus_too_unless_nvlink_is_asked_for(
    wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NVLINK, "1")
    assert MooncakeEngine("127.0.0.1", on_gpu=True).over_nvlink
    assert FORCE_TCP not in os.environ
    monkeypatch.delenv(NVLINK)
    assert not MooncakeEngine("127.0.0.1", on_gpu=True).over_nvlink
    assert os.environ[FORCE_TCP] == "1"


@pytest.mark.parametrize(
    ("settings", "on_gpu", "reason"),
    [
        ({NVLINK: "0"}, True, f"{NVLINK}: 0; allowed: 1, or not set"),
        ({NVLINK: "1"}, False, "nothing but memory of GPUs.*--device cuda"),
        ({NVLINK: "1", FORCE_TCP: "1"}, True, f"both.*unset {FORCE_TCP} for NVLink"),
    ],
)
def test_nvlink_that_cannot_be_is_refused(
    wheel: FakeWheel,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    on_gpu: bool,
    reason: str,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StartupError, match=reason):
        MooncakeEngine("127.0.0.1", on_gpu=on_gpu)


def test_a_build_that_would_take_a_gpus_address_for_the_hosts_is_refused(
    wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel.SUPPORT_INTRA_NVLINK = False
    MooncakeEngine("127.0.0.1", on_gpu=True)
    monkeypatch.delenv(FORCE_TCP)
    monkeypatch.setenv(NVLINK, "1")
    with pytest.raises(StartupError, match="has no NVLink"):
        MooncakeEngine("127.0.0.1", on_gpu=True)
    del wheel.SUPPORT_CUDA
    monkeypatch.delenv(NVLINK)
    with pytest.raises(StartupError, match="mooncake-transfer-engine-cuda13"):
        MooncakeEngine("127.0.0.1", on_gpu=True)


@pytest.mark.parametrize("batch", [0, -1, (1 << 64) - 1])
def test_an_id_of_no_batch_is_never_asked_about(wheel: FakeWheel, batch: int) -> None:
    engine = MooncakeEngine("127.0.0.1")
    wheel.batch = batch
    assert engine.write("127.0.0.1:1", 8, 8, 8) is None
    assert engine.read("127.0.0.1:1", 8, 8, 8) is None
    assert not wheel.asked


@pytest.mark.parametrize(("status", "landed"), [(1, True), (-1, False)])
def test_a_batch_that_has_ended_is_never_asked_about_again(
    wheel: FakeWheel, status: int, landed: bool
) -> None:
    # -2 is a time-out of the engine's, after which the bytes may still land: not an end.
    wheel.statuses = [0, 0, -2, status]
    transfer = MooncakeEngine("127.0.0.1").write("127.0.0.1:1", 8, 8, 8)
    assert transfer is not None
    assert [transfer.landed() for _ in range(6)] == [None, None, None, landed, landed, landed]
    assert wheel.asked == [1234] * 4


def test_a_gate_that_is_shut_lets_nobody_in(
    wheel: FakeWheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake, "GATE_SECONDS", 0.01)
    engine = MooncakeEngine("127.0.0.1")
    engine.shut_the_gate()
    engine.shut_the_gate()
    thread = threading.Thread(target=engine.write, args=("127.0.0.1:1", 8, 8, 8), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()

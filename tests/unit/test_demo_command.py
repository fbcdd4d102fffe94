"""What `cpkv demo` says where it cannot start; no process is started here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest

from cp_shared_kv.cli import demo
from cp_shared_kv.engine import cluster
from cp_shared_kv.errors import StartupError

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts a process fails the test; the signals of the test's process stay."""

    def start(_self: object) -> NoReturn:
        pytest.fail("processes were started")

    monkeypatch.setattr(cluster.Cluster, "_start", start)
    monkeypatch.setattr(demo, "on_stop_signals", lambda _told: None)


def test_gpus_that_are_not_there_are_one_line(
    cpkv: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu() -> NoReturn:
        raise StartupError("--device cuda: none here", change="take another machine")

    monkeypatch.setattr(cluster, "look_at_gpus", no_gpu)
    assert cpkv("demo", "--device", "cuda") == (
        1,
        "",
        "cpkv: --device cuda: none here; to change it: take another machine\n",
    )


def test_a_transfer_backend_that_is_not_installed_is_refused(
    cpkv: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda _name: None)
    code, out, err = cpkv("demo", "--disaggregation-transfer-backend", "mooncake")
    assert (code, out) == (1, "")
    assert err == (
        "cpkv: --disaggregation-transfer-backend needs a package that is not installed: mooncake; "
        "allowed: shared_memory; to change it: pip install 'cp-shared-kv[mooncake]'\n"
    )

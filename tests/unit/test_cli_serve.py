"""What ends a start of `cpkv serve` before any process runs; none is started here."""

from __future__ import annotations

import signal
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from cp_shared_kv.cli.serve import serve, with_model
from cp_shared_kv.demo_model.cache import demo_checkpoint_directory
from cp_shared_kv.engine import cluster
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.errors import ConfigError, StartStoppedError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Generator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_demo_model_is_served_as_demo_unless_it_is_given_another_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    config = EngineConfig(model_path=Path("demo"))
    assert with_model(config).model_path == demo_checkpoint_directory()
    assert with_model(config).model_name == "demo"
    assert with_model(replace(config, served_model_name="mine")).model_name == "mine"
    other = EngineConfig(model_path=Path("/models/tiny"))
    assert with_model(other) == other


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_start_that_would_never_end(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def never_described(_config: EngineConfig) -> None:
        signal.raise_signal(number)
        pytest.fail("the start went on")

    monkeypatch.setattr(cluster, "describe_model", never_described)
    assert serve(EngineConfig(model_path=Path("/m"), port=0)) == 0


def test_a_transfer_backend_that_is_not_installed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda _name: None)
    config = EngineConfig(model_path=Path("/m"), port=0, disaggregation_transfer_backend="mooncake")
    with pytest.raises(ConfigError, match=r"not installed: mooncake; .*cp-shared-kv\[mooncake\]"):
        serve(config)


def test_a_signal_that_a_library_swallows_ends_the_start_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def swallowed(_config: EngineConfig) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            return

    def started(run: cluster.Cluster) -> None:
        assert run._stop_asked is not None
        assert run._stop_asked.is_set()
        raise StartStoppedError("stopped while starting")

    monkeypatch.setattr(cluster, "describe_model", swallowed)
    monkeypatch.setattr(cluster, "_sized", lambda _config, _model: None)
    monkeypatch.setattr(cluster.Cluster, "_start", started)
    assert serve(EngineConfig(model_path=Path("/m"), port=0)) == 0

"""The API key may come from the environment, and is never dropped in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from cp_shared_kv.cli.serve import serve
from cp_shared_kv.engine.api_key import with_api_key
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.errors import ConfigError


def config(api_key: str | None = None) -> EngineConfig:
    return EngineConfig(model_path=Path("/m"), api_key=api_key)


def test_the_environment_gives_the_key_that_the_command_line_does_not() -> None:
    assert with_api_key(config(), {"CPKV_API_KEY": "sk-1"}) == config("sk-1")
    assert with_api_key(config("sk-2"), {"CPKV_API_KEY": "sk-1"}) == config("sk-2")
    assert with_api_key(config(), {"PATH": "/bin"}) == config()


@pytest.mark.parametrize("value", ["", "two words", "line\n"])
def test_a_variable_that_is_no_key_is_refused_and_not_repeated(value: str) -> None:
    with pytest.raises(ConfigError, match="CPKV_API_KEY") as caught:
        with_api_key(config(), {"CPKV_API_KEY": value})
    assert not value or value not in str(caught.value)


def test_serve_looks_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv("CPKV_API_KEY", "two words")
    with pytest.raises(ConfigError, match="CPKV_API_KEY"):
        serve(config())  # before anything is started

"""--api-key: who gets in, and that the key is told to nobody."""

from __future__ import annotations

import logging
from pathlib import Path

import httpx
import openai
import pytest

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.errors import ConfigError
from cp_shared_kv.server.settings import ServerSettings

KEY = "sk-0123456789"
BODY = {"model": "fake-model", "prompt": "x"}


@pytest.fixture
def guarded(own_server):
    return own_server(settings=ServerSettings(api_key=KEY, enable_metrics=True))


def test_openais_client_with_the_key_is_served(guarded, openai_client):
    with openai_client(guarded[0], KEY) as client:
        assert client.completions.create(**BODY).choices[0].text == "the answer"
        assert client.models.list().data[0].id == "fake-model"


def test_openais_client_with_another_key_is_not(guarded, openai_client):
    server, engine = guarded
    with (
        openai_client(server, "sk-wrong") as client,
        pytest.raises(openai.AuthenticationError) as c,
    ):
        client.completions.create(**BODY)
    assert c.value.code == "invalid_api_key"
    assert engine.requests == []


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer {KEY} {KEY}",
        b"Bearer \xff\xfe",
    ],
)
def test_anything_else_is_refused(guarded, authorization):
    headers = {} if authorization is None else {"authorization": authorization}
    response = httpx.post(f"{guarded[0].url}/v1/completions", json=BODY, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert "x-request-id" in response.headers


def test_the_scheme_is_read_in_any_case(guarded):
    headers = {"authorization": f"bearer {KEY}"}
    assert httpx.get(f"{guarded[0].url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/openapi.json", "/docs"])
def test_paths_that_are_open(guarded, path):
    assert httpx.get(guarded[0].url + path).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/server_info",
        "/dashboard/state",
        "/v1/loads",
        "/health_generate",
        "/no/such",
        "/health/",
    ],
)
def test_all_others_are_not(guarded, path):
    assert httpx.get(guarded[0].url + path).status_code == 401


def test_neither_log_nor_settings_tell_the_key(guarded, caplog):
    caplog.set_level(logging.DEBUG)
    for key in (KEY, "sk-guess"):
        headers = {"authorization": f"Bearer {key}"}
        httpx.post(f"{guarded[0].url}/v1/completions", json=BODY, headers=headers)
    assert '"status": 401' in caplog.text
    assert KEY not in caplog.text
    assert "sk-guess" not in caplog.text
    assert KEY not in repr(ServerSettings(api_key=KEY))


def test_the_config_shows_that_there_is_a_key_and_not_which():
    config = EngineConfig(model_path=Path("/m"), api_key=KEY)
    assert KEY not in repr(config)
    assert KEY not in str(config.as_shown())
    assert config.as_shown()["api_key"] == "(set)"
    assert EngineConfig(model_path=Path("/m")).as_shown()["api_key"] is None
    assert EngineConfig.from_plain(config.as_plain()) == config


@pytest.mark.parametrize("key", ["", "two words", "tab\t", "ключ"])
def test_a_key_that_no_header_could_carry_is_refused_and_not_repeated(key):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model_path=Path("/m"), api_key=key)
    assert "--api-key" in str(caught.value)
    assert not key or key not in str(caught.value)

"""A real server over a fake engine and a byte-level tokenizer, and clients of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest

from cp_shared_kv.demo_model.byte_tokenizer import byte_tokenizer
from cp_shared_kv.engine.api import EngineDescription
from cp_shared_kv.server.chat_template import ChatTemplate
from cp_shared_kv.server.settings import ServerSettings
from cp_shared_kv.server.tokenizer import Tokenizer
from cp_shared_kv.testing.fake_engine import DESCRIPTION, FakeEngine
from cp_shared_kv.testing.live_server import LiveServer, start_server

CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with tokenizer.json, as a checkpoint has it."""
    directory = tmp_path_factory.mktemp("model")
    byte_tokenizer("<s>", "</s>").save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.from_directory(model_directory)


@pytest.fixture(scope="session")
def description() -> EngineDescription:
    return DESCRIPTION


@pytest.fixture(scope="session")
def shared_server(tokenizer: Tokenizer) -> Iterator[tuple[LiveServer, FakeEngine]]:
    engine = FakeEngine()
    server = start_server(
        engine,
        tokenizer,
        DESCRIPTION,
        chat_template=ChatTemplate(CHAT_TEMPLATE),
        settings=ServerSettings(enable_metrics=True),
    )
    yield server, engine
    server.stop()


@pytest.fixture
def engine(shared_server: tuple[LiveServer, FakeEngine]) -> FakeEngine:
    shared_server[1].reset()
    return shared_server[1]


@pytest.fixture
def server(shared_server: tuple[LiveServer, FakeEngine], engine: FakeEngine) -> LiveServer:
    return shared_server[0]


@pytest.fixture(scope="session")
def shared_http(shared_server: tuple[LiveServer, FakeEngine]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shared_server[0].url, timeout=20, verify=False) as client:
        yield client


@pytest.fixture
def http(shared_http: httpx.Client, engine: FakeEngine) -> httpx.Client:
    return shared_http


@pytest.fixture(scope="session")
def shared_client(shared_server: tuple[LiveServer, FakeEngine]) -> Iterator[openai.OpenAI]:
    url = f"{shared_server[0].url}/v1"
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def client(shared_client: openai.OpenAI, engine: FakeEngine) -> openai.OpenAI:
    return shared_client


@pytest.fixture
def own_server(tokenizer: Tokenizer) -> Iterator[Callable[..., tuple[LiveServer, FakeEngine]]]:
    """For tests that stop the server, or change the engine's description or the app's options."""
    servers: list[LiveServer] = []

    def make(*, drain_seconds: int = 5, **changes: object) -> tuple[LiveServer, FakeEngine]:
        engine = FakeEngine()
        described = {name: changes.pop(name) for name in vars(DESCRIPTION) if name in changes}
        description = replace(DESCRIPTION, **described)
        servers.append(start_server(engine, tokenizer, description, drain_seconds, **changes))
        return servers[-1], engine

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def openai_client() -> Callable[..., openai.OpenAI]:
    """OpenAI's client for a server of the test's own; to be closed."""

    def make(server: LiveServer, api_key: str = "unused") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=0)

    return make

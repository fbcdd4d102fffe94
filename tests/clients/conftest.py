"""A cluster for clients, and runs of clients from the environments of `make test-clients`."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cp_shared_kv.testing.running_cluster import Running, running, small_config

RANK_TOKENS = 4096
CLIENT_SECONDS = 280


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two ranks that share a pool of 8,192 tokens: room for what benchmark clients ask."""
    config = small_config(max_total_tokens=RANK_TOKENS, decode_max_total_tokens=4 * RANK_TOKENS)
    log_file = tmp_path_factory.mktemp("cluster") / "cluster.log"
    with running(config, log_file) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def environments() -> Path:
    """The folder of the clients' environments; skips where `make test-clients` has not named it."""
    named = os.environ.get("CPKV_CLIENTS")
    if not named:
        pytest.skip("needs clients in environments of their own: make test-clients")
    return Path(named)


@pytest.fixture(scope="session")
def small_trace() -> Path:
    """Nine requests in the format of Mooncake's traces. With ten and more AIPerf starts processes
    that know no tokenizer from a folder."""
    return Path(__file__).with_name("mooncake_small.jsonl")


@dataclass(frozen=True)
class Counted:
    """What the server has counted while a client ran."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finished: int
    unfinished: int


ClientRun = Callable[[str, Sequence[str]], Counted]


@pytest.fixture
def run_client(served: Running, environments: Path) -> ClientRun:
    """Runs a client to its end, which must be a good one, on a server with an empty cache. What it
    prints is left in `outputs/NAME.txt` of the environments' folder."""
    outputs = environments / "outputs"
    outputs.mkdir(exist_ok=True)

    def run(name: str, command: Sequence[str]) -> Counted:
        served.until_nothing_is_held()
        served.flush_cache()
        before = served.get("/server_info").json()["totals"]
        with (outputs / f"{name}.txt").open("w+") as output:
            output.write(f"$ {shlex.join(command)}\n")
            output.flush()
            code = subprocess.run(
                command,
                env=_own_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=CLIENT_SECONDS,
            ).returncode
            output.seek(0)
            assert code == 0, output.read()
        served.until_nothing_is_held()
        return _counted(before, served.get("/server_info").json()["totals"])

    return run


def _own_environment() -> dict[str, str]:
    """Without this project on the path, and without a proxy before the server."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    kept.pop("PYTHONPATH", None)
    return kept | {"COLUMNS": "120"}  # wide enough for the clients' tables


def _counted(before: dict, after: dict) -> Counted:
    ended = {how: after["requests"][how] - count for how, count in before["requests"].items()}
    finished = ended.pop("finished")
    names = ("prompt_tokens", "cached_tokens", "generated_tokens")
    return Counted(*(after[name] - before[name] for name in names), finished, sum(ended.values()))

"""What nobody may learn by the way: the API key and the prompts, from logs, figures, errors, `ps`
and the file system."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from cp_shared_kv.memory.segment_names import SHARED_MEMORY_DIRECTORY
from cp_shared_kv.testing.client_load import body
from cp_shared_kv.testing.running_cluster import Running, small_config
from cp_shared_kv.testing.running_cluster import running as start_cluster

pytestmark = pytest.mark.e2e

KEY = "sk-e2e-0d1f7c9b3a"
WORD = "xylophonic"  # of every prompt, and of nothing else
PROCESSES = ["server-0", "prefill-0", "prefill-0/rank-0", "prefill-0/rank-1", "decode-0"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A cluster with a key that logs all it can, after requests that went well and badly."""
    config = small_config(api_key=KEY, log_level="debug", max_total_tokens=256)
    with start_cluster(config, tmp_path_factory.mktemp("secrets") / "cluster.log") as cluster:
        yield cluster


def ask(served: Running, method: str, path: str, key: str | None, json: Any = None) -> Any:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.request(
        method, served.url + path, json=json, headers=headers, trust_env=False, timeout=60
    )


@pytest.fixture(scope="module")
def answers(guarded: Running) -> list[httpx.Response]:
    """Of every kind of request, with the right key, a wrong one and none."""
    prompt = body(f"a {WORD} question " * 4, 8)
    asked: list[tuple[str, str, Any]] = [
        ("POST", "/v1/completions", prompt),
        ("POST", "/v1/completions", prompt | {"prompt": WORD * 200}),  # too long
        ("POST", "/v1/completions", prompt | {"timeout": 0.001}),
        ("POST", "/v1/completions", prompt | {"stop": WORD, "temperature": 99}),
        ("POST", "/v1/completions", {"model": "demo", "prompt": {WORD: 1}}),
        ("POST", "/v1/chat/completions", {"model": "demo", "messages": [{"content": WORD}]}),
        ("POST", "/abort_request", {"rid": "nobody"}),
        ("POST", "/flush_cache", None),
        *(
            ("GET", path, None)
            for path in (
                "/dashboard/state",
                "/metrics",
                "/server_info",
                "/v1/loads",
                "/v1/models",
                "/health",
                "/health_generate",
                "/debug/invariants",
                "/openapi.json",
                "/docs",
                "/no/such",
            )
        ),
    ]
    keys = (KEY, KEY[:-1], None)
    return [ask(guarded, *request[:2], key, request[2]) for request in asked for key in keys]


def test_the_requests_are_of_all_kinds(answers: list[httpx.Response]) -> None:
    assert {answer.status_code for answer in answers} >= {200, 400, 401, 404, 504}


def test_no_answer_tells_the_key_or_repeats_a_prompt(answers: list[httpx.Response]) -> None:
    for answer in answers:
        told = answer.text + str(answer.headers)
        assert KEY[:-1] not in told
        assert WORD not in told


def test_no_log_line_does(guarded: Running, answers: list[httpx.Response]) -> None:
    log = guarded.log_file.read_text()
    assert "/v1/completions" in log
    assert KEY[:-1] not in log
    assert WORD not in log


def test_ps_does_not_show_the_key(guarded: Running) -> None:
    for name in PROCESSES:
        command = Path(f"/proc/{guarded.cluster.pid(name)}/cmdline").read_bytes()
        assert b"cp_shared_kv" in command
        assert KEY.encode() not in command


def test_the_key_is_in_no_file_of_the_run(guarded: Running) -> None:
    files = [path for path in Path(guarded.cluster.spec.run_dir).iterdir() if path.is_file()]
    assert any(path.name == "run.json" for path in files)
    for path in files:
        assert KEY.encode() not in path.read_bytes()


def test_only_the_server_is_given_the_key(guarded: Running) -> None:
    having: list[str] = []
    for name in PROCESSES:
        environment = Path(f"/proc/{guarded.cluster.pid(name)}/environ").read_bytes()
        assert b"OMP_NUM_THREADS=1" in environment
        if KEY.encode() in environment:
            having.append(name)
    assert having == ["server-0"]


def test_that_there_is_a_key_is_shown(guarded: Running) -> None:
    assert ask(guarded, "GET", "/server_info", KEY).json()["api_key"] == "(set)"


def test_other_users_can_open_nothing(guarded: Running) -> None:
    spec = guarded.cluster.spec
    run_dir = os.stat(spec.run_dir)
    assert stat.S_IMODE(run_dir.st_mode) == 0o700
    found = {path.name: path.stat().st_mode for path in Path(spec.run_dir).iterdir()}
    assert {"run.json", "supervisor.sock", "server-0.1.sock", "decode-0.1.sock"} <= found.keys()
    assert [name for name, mode in found.items() if mode & 0o077] == []
    segments = list(Path(SHARED_MEMORY_DIRECTORY).glob(f"cpkv-{spec.run_id}-*"))
    assert segments  # decode's pool; those of the ranks have no name any more
    for segment in segments:
        assert stat.S_IMODE(segment.stat().st_mode) == 0o600


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets that a process has open."""
    inodes: set[str] = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            target = os.readlink(fd)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def test_nothing_listens_for_other_machines(guarded: Running) -> None:
    """The server, and the ranks' collectives, listen on the loopback address alone."""
    listening: set[str] = set()
    for name in PROCESSES:
        pid = guarded.cluster.pid(name)
        inodes = sockets_of(pid)
        for table in ("tcp", "tcp6", "udp", "udp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                listens = table.startswith("udp") or fields[3] == "0A"
                if listens and fields[9] in inodes:
                    listening.add(f"{table} {fields[1]}")
    assert f"tcp 0100007F:{httpx.URL(guarded.url).port:04X}" in listening
    assert {one for one in listening if not one.startswith("tcp 0100007F:")} == set()

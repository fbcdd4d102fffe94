"""What the README says can be done: its examples run, and its targets and flags exist."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.config_values import flag

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
DOCUMENTS = [README, (ROOT / "CONTRIBUTING.md").read_text()]
SERVED_AT = "http://127.0.0.1:30000"
START_SECONDS = 120
FLAGS_OF_OTHER_COMMANDS = {
    "--help",  # of every command
    "--flip-byte",  # of cpkv demo
    "--gpu",  # of cpkv plan
    "--index-url",  # of pip
    "--shm-size",  # of docker
    "--ipc",
}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def library_examples() -> list[str]:
    texts = [README, (ROOT / "docs/how-it-works.md").read_text()]
    return [code for text in texts for code in blocks(text, "python") if "cp_shared_kv" in code]


@pytest.mark.parametrize("code", library_examples(), ids=["README", "how-it-works"])
def test_a_library_example_prints_what_stands_behind_each_line(code: str) -> None:
    expected = [
        line.rsplit("  # ", 1)[1] for line in code.splitlines() if line.startswith("print(")
    ]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected
    assert expected


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", MAKEFILE, re.M))
    named = {
        name
        for text in DOCUMENTS
        for name in re.findall(r"^make ([a-z]+)|`make ([a-z]+)", text, re.M)
        for name in name
        if name
    }
    assert {"run", "test", "serve", "check"} <= named
    assert named <= targets


def test_every_flag_that_is_named_is_a_setting() -> None:
    settings = {flag(field.name) for field in dataclasses.fields(EngineConfig)}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named - FLAGS_OF_OTHER_COMMANDS <= settings


def test_the_table_of_flags_has_every_setting_with_its_default() -> None:
    table = dict(re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \|", README, re.M))
    assert table == {
        flag(field.name): shown_default(field) for field in dataclasses.fields(EngineConfig)
    }


def shown_default(field: dataclasses.Field[object]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    named: dict[object, str] = {None: "not set", False: "off"}
    return named.get(field.default, f"`{field.default}`")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server of the README's `make serve ARGS=...`, on a free port."""
    match = re.search(r'^make serve ARGS="(.*)"$', README, re.M)
    recipe = re.search(r"\$\(BIN\)/cpkv (serve .*)", MAKEFILE)
    assert match is not None
    assert recipe is not None
    arguments = shlex.split(recipe[1].replace("$(ARGS)", match[1]))
    command = [sys.executable, "-c", "from cp_shared_kv.cli import main; main()"]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("wb") as stderr:
        server = subprocess.Popen([*command, *arguments, "--port", "0"], stderr=stderr)
    try:
        yield announced_url(server, log)
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0, log.read_text()
    finally:
        server.kill()  # its children end with it


def announced_url(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        found = re.search(r"serving demo at (http://\S+)/v1", log.read_text())
        if found:
            return found[1]
        assert server.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def without_proxies() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}


@pytest.mark.e2e
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_examples_are_answered(url: str) -> None:
    commands = [code for code in blocks(README, "sh") if code.startswith("curl")]
    answers = ['"object":"text_completion"', '"object":"chat.completion.chunk"', '"output_ids":[']
    for command, answer in zip(commands, answers, strict=True):
        assert SERVED_AT in command
        done = subprocess.run(
            ["sh", "-c", command.replace(SERVED_AT, url)],
            env=without_proxies(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert answer in done.stdout


@pytest.mark.e2e
def test_the_openai_example_finds_its_prefix_the_second_time(url: str) -> None:
    (code,) = (code for code in blocks(README, "python") if "openai" in code)
    assert SERVED_AT in code
    done = subprocess.run(
        [sys.executable, "-c", code.replace(SERVED_AT, url)],
        env=without_proxies(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "5280 prompt tokens, 0 cached",
        f"5280 prompt tokens, {5279 // 64 * 64} cached",
    ]

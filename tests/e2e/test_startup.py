"""What cannot start says so in one line, exits with an error, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from cp_shared_kv.demo_model.cache import demo_checkpoint_directory
from cp_shared_kv.engine.cluster import Cluster
from cp_shared_kv.errors import StartupError
from cp_shared_kv.testing.running_cluster import small_config

pytestmark = pytest.mark.e2e

CPKV = [str(Path(sys.executable).with_name("cpkv"))]
SHARED = [
    "--attention-context-parallel-size=2",
    "--enable-nsa-prefill-context-parallel",
    "--enable-nsa-prefill-cp-shared-kv",
    "--max-total-tokens=1024",
]


MARK = "CPKV_TEST_MARK"
PR_SET_CHILD_SUBREAPER = 36


def running_with(mark: str) -> list[str]:
    """Command lines of the processes that were started under a mark."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue  # it ended meanwhile
        if f"{MARK}={mark}".encode() in environment.split(b"\0") and command:
            found.append(command.replace(b"\0", b" ").decode())
    return found


def segments() -> set[str]:
    """Shared-memory segments of any cluster."""
    return {path.name for path in Path("/dev/shm").glob("cpkv-*")}


def assert_nothing_left(mark: str, segments_before: set[str]) -> None:
    assert running_with(mark) == []
    deadline = time.monotonic() + 5  # another cluster of this host may just be starting
    while segments() - segments_before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert segments() <= segments_before


def refused(*arguments: str) -> str:
    """The one line that `cpkv serve` ends with; nothing may be left of it."""
    mark, before = uuid.uuid4().hex, segments()
    ended = subprocess.run(
        [*CPKV, "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {MARK: mark},
    )
    assert ended.returncode not in (0, None)
    assert_nothing_left(mark, before)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("cpkv: ")]
    assert len(lines) == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    return lines[0]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the demo model that a test may damage."""
    return Path(shutil.copytree(demo_checkpoint_directory(), tmp_path / "model"))


def test_a_port_in_use_is_named_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("--model-path=demo", *SHARED, f"--port={port}")
    assert f"127.0.0.1:{port}" in line
    assert "in use" in line


def test_a_missing_checkpoint_is_named() -> None:
    assert "/no/such/model" in refused("--model-path=/no/such/model", *SHARED, "--port=0")


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
def test_a_file_that_is_nested_too_deep_is_named(checkpoint: Path, file: str) -> None:
    (checkpoint / file).write_text("[" * 100_000)
    assert file in refused(f"--model-path={checkpoint}", *SHARED, "--port=0")


@pytest.mark.parametrize("place", ["/proc/recording", "/dev/null", "/etc/passwd/recording"])
def test_a_recording_that_cannot_be_written_is_refused_before_anything_starts(place: str) -> None:
    line = refused("--model-path=demo", *SHARED, "--port=0", f"--record-batches={place}")
    assert line.startswith("cpkv: --record-batches can write no file there")
    assert place in line


def test_an_empty_model_path_is_not_the_present_directory() -> None:
    assert "--model-path is empty" in refused("--model-path=", *SHARED, "--port=0")


def test_a_truncated_checkpoint_is_named(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    line = refused(f"--model-path={checkpoint}", *SHARED, "--port=0")
    assert "model.safetensors" in line


def test_a_tensor_of_another_shape_is_named_with_both_shapes(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["intermediate_size"] += 8
    (checkpoint / "config.json").write_text(json.dumps(config))
    line = refused(f"--model-path={checkpoint}", *SHARED, "--port=0")
    assert "model.safetensors" in line
    assert str(config["intermediate_size"]) in line
    assert str(config["intermediate_size"] - 8) in line


def test_too_little_shared_memory_is_told_in_bytes() -> None:
    line = refused("--model-path=demo", *SHARED[:-1], "--max-total-tokens=4000000000", "--port=0")
    assert "shared memory" in line
    assert "--max-total-tokens" in line


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--attention-context-parallel-size=2"], "--enable-nsa-prefill-context-parallel"),
        (["--enable-nsa-prefill-cp-shared-kv"], "--enable-nsa-prefill-context-parallel"),
        (["--kv-read=pull"], "--enable-nsa-prefill-cp-shared-kv"),
        (["--page-size=48"], "--page-size"),
        (["--context-length=999999"], "max_position_embeddings"),
        (["--kv-cache-dtype=fp8_e4m3"], "kv_lora_rank"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: list[str], named: str) -> None:
    assert named in refused("--model-path=demo", "--port=0", *flags)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_stop_ends_the_server_with_exit_code_0(
    number: signal.Signals, tmp_path: Path
) -> None:
    mark, before = uuid.uuid4().hex, segments()
    server = subprocess.Popen(
        [*CPKV, "serve", "--model-path=demo", *SHARED, "--port=0"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {MARK: mark, "TMPDIR": str(tmp_path)},
    )
    assert server.stderr is not None
    for line in server.stderr:
        if "serving demo at http://" in line:
            break
    assert len(running_with(mark)) == 6  # so that an empty list below means something
    assert len(list(tmp_path.iterdir())) == 1
    server.send_signal(number)
    assert server.wait(20) == 0
    assert_nothing_left(mark, before)
    assert list(tmp_path.iterdir()) == []


def test_it_goes_on_without_its_terminal_under_nohup() -> None:
    mark, before = uuid.uuid4().hex, segments()
    server = subprocess.Popen(
        ["nohup", *CPKV, "serve", "--model-path=demo", *SHARED, "--port=0"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {MARK: mark},
    )
    assert server.stderr is not None
    for line in server.stderr:
        if "serving demo at http://" in line:
            break
    server.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        server.wait(2)
    server.send_signal(signal.SIGTERM)
    assert server.wait(20) == 0
    assert_nothing_left(mark, before)


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    environment = {"TMPDIR": str(tmp_path)}
    server = started(uuid.uuid4().hex, wanted=3, environment=environment)
    (left,) = tmp_path.iterdir()
    server.kill()
    server.wait()
    assert (left / "run.json").exists()
    mark = uuid.uuid4().hex
    server = started(mark, wanted=3, environment=environment)
    assert left not in tmp_path.iterdir()
    server.send_signal(signal.SIGTERM)
    assert server.wait(15) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_dangling_weights_link_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors").symlink_to("/nonexistent")
    assert "model.safetensors" in refused(f"--model-path={checkpoint}", *SHARED, "--port=0")


def test_a_temporary_directory_with_a_long_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    assert "TMPDIR" in refused("--model-path=demo", *SHARED, "--port=0")


def started(
    mark: str, wanted: int, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """`cpkv serve` with so many processes running, still starting."""
    server = subprocess.Popen(
        [*CPKV, "serve", "--model-path=demo", *SHARED, "--port=0"],
        stderr=subprocess.DEVNULL,
        env={**os.environ, MARK: mark, **(environment or {})},
    )
    deadline = time.monotonic() + 60
    while len(running_with(mark)) < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return server


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_starting_stops_at_once(number: signal.Signals) -> None:
    mark, before = uuid.uuid4().hex, segments()
    server = started(mark, wanted=3)
    server.send_signal(number)
    assert server.wait(15) == 0
    assert_nothing_left(mark, before)


def test_a_killed_supervisor_takes_its_children_along_even_under_a_subreaper() -> None:
    mark = uuid.uuid4().hex
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        server = started(mark, wanted=2)  # some child has not asked the kernel yet
        server.kill()
        server.wait()
        deadline = time.monotonic() + 30
        while running_with(mark) and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.1)
        assert running_with(mark) == []
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.skipif(
    subprocess.run(
        ["unshare", "--pid", "--fork", "true"], check=False, capture_output=True
    ).returncode
    != 0,
    reason="this user may not make a process namespace",
)
def test_it_serves_as_process_1_of_a_container() -> None:
    mark = uuid.uuid4().hex
    contained = ["unshare", "--pid", "--fork", "--kill-child"]
    server = subprocess.Popen(
        [*contained, *CPKV, "serve", "--model-path=demo", *SHARED, "--port=0"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {MARK: mark},
    )
    assert server.stderr is not None
    try:
        lines: list[str] = []
        for line in server.stderr:
            lines.append(line)
            if line.startswith("cpkv: "):
                break
        assert "serving demo at" in lines[-1], lines
    finally:
        server.kill()
        server.wait()


def test_a_child_that_dies_during_the_start_is_named(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_a_rank(_what: str, _done: int, _total: int) -> None:
        if not killed:
            killed.append(cluster.pid("prefill-0/rank-1"))
            os.kill(killed[0], signal.SIGKILL)

    cluster = Cluster(small_config(), log_file=tmp_path / "log", on_progress=kill_a_rank)
    with (
        pytest.raises(
            StartupError, match="the start failed: prefill-0/rank-1 was killed by SIGKILL"
        ),
        cluster,
    ):
        pass
    assert killed

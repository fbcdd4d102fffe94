"""Strangers without keys who connect to the control port, more of them than files can be open."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from cp_shared_kv.engine.control_keys import ControlKeys
from cp_shared_kv.testing.serve_process import ServeProcess

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("mooncake") is None,
        reason="mooncake-transfer-engine-non-cuda has no wheel for this Python",
    ),
]

OPEN_FILES = 256
STRANGERS = 2 * OPEN_FILES


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_a_run_outlives_more_strangers_than_it_can_have_open_files(tmp_path: Path) -> None:
    ControlKeys.create(tmp_path / "keys")
    served = ServeProcess(
        tmp_path / "log",
        "--max-total-tokens=1024",
        "--disaggregation-transfer-backend=mooncake",
        "--control-host=127.0.0.1",
        f"--control-keys={tmp_path / 'keys'}",
        enter=["prlimit", f"--nofile={OPEN_FILES}:{OPEN_FILES}"],
    )
    found = re.search(r"can join at (\S+):(\d+)", served.log())
    assert found is not None
    files = Path(f"/proc/{served.process.pid}/fd")
    strangers: list[socket.socket] = []
    try:
        for _ in range(STRANGERS):
            stranger = socket.socket()
            stranger.setblocking(False)
            strangers.append(stranger)
            with suppress(BlockingIOError):
                stranger.connect((found[1], int(found[2])))
        until(lambda: len(list(files.iterdir())) == OPEN_FILES, "no file can be opened any more")
        (worker,) = (pid for pid, command in served.children().items() if " decode-0.1" in command)
        os.kill(worker, signal.SIGKILL)
        until(lambda: "the system refuses" in served.log(), "the supervisor is refused something")
        # Whoever does not prove that it is none is dropped, though it stays.
        until(lambda: "decode-0 is back" in served.log(), "decode-0 comes back")
    finally:
        for stranger in strangers:
            stranger.close()
    assert served.answer().status_code == 200
    assert served.log().count("the system refuses the end of decode-0.1") <= 1
    assert served.end() == 0

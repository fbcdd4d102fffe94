"""A run's private directory: whose it is, and who removes it when its run could not."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cp_shared_kv.engine.run_dir import HELD_FILE, RunDir, remove_stale_run_dirs
from cp_shared_kv.errors import StartupError

HOLD = """
import time
from cp_shared_kv.engine.run_dir import RunDir

made = RunDir()
print(made.path, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed_run(temporary: Path) -> Path:
    """The directory of a run that was killed."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    path = Path(holder.stdout.readline().strip())
    assert path.is_dir()
    assert remove_stale_run_dirs() == []  # while it lives
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    return path


def test_the_directory_and_its_files_are_its_users_alone() -> None:
    made = RunDir()
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((made.path / HELD_FILE).stat().st_mode) == 0o600
    made.remove()


def test_it_is_gone_when_its_run_has_ended(temporary: Path) -> None:
    made = RunDir()
    (made.path / "run.json").write_text("{}")
    made.remove()
    made.remove()
    assert list(temporary.iterdir()) == []


def test_that_of_a_killed_run_is_removed_at_the_next_start(temporary: Path) -> None:
    stale = killed_run(temporary)
    (stale / "run.json").write_text("{}")
    made = RunDir()
    assert list(temporary.iterdir()) == [made.path]
    made.remove()


def test_that_of_a_live_run_stays() -> None:
    first, second = RunDir(), RunDir()
    assert remove_stale_run_dirs() == []
    assert first.path.is_dir()
    first.remove()
    second.remove()


def test_what_only_has_such_a_name_stays(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / HELD_FILE).touch()
    (temporary / "cpkv-link").symlink_to(elsewhere)
    (temporary / "cpkv-demo-1").mkdir()
    (temporary / "cpkv-file").touch()
    (temporary / "cpkv-other").mkdir()
    (temporary / "cpkv-other" / HELD_FILE).symlink_to(elsewhere / HELD_FILE)
    before = sorted(temporary.rglob("*"))
    assert remove_stale_run_dirs() == []
    assert sorted(temporary.rglob("*")) == before


def test_nothing_is_left_where_the_path_is_too_long(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(StartupError, match="TMPDIR"):
        RunDir()
    assert list(deep.iterdir()) == []

"""What `make` would do about torch: another build only for who asks for one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """The stamps of an environment that `make run` made, with the CPU build."""
    (tmp_path / ".torch").write_text(f"index={CPU_INDEX}\n")
    (tmp_path / ".engine").touch()
    return tmp_path


def would_do(venv: Path, *arguments: str) -> str:
    command = ["make", "-C", str(ROOT), "-n", "run", f"VENV={venv}", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
        env={"PATH": "/usr/bin:/bin"},
    ).stdout


def test_an_environment_that_is_there_is_used(venv: Path) -> None:
    for arguments in ((), (f"TORCH_INDEX={CPU_INDEX}",)):
        shown = would_do(venv, *arguments)
        assert "installing" not in shown
        assert f"{venv}/bin/cpkv demo" in shown


@pytest.mark.parametrize("index", ["", "https://download.pytorch.org/whl/cu130"])
def test_another_build_replaces_the_one_that_is_there(venv: Path, index: str) -> None:
    shown = would_do(venv, f"TORCH_INDEX={index}")
    # Without its stamp an environment that is left half changed is made whole by the next run.
    assert f"rm -f {venv}/.torch; {venv}/bin/pip uninstall -q -y torch" in shown
    assert f'echo "index={index}" > {venv}/.torch' in shown
    assert "installing cp-shared-kv" in shown  # and with it what the other build needs


def test_the_choice_stays_where_none_is_given(venv: Path) -> None:
    (venv / ".torch").write_text("index=\n")
    (venv / ".engine").touch()
    assert "installing" not in would_do(venv)

"""`cpkv keys`, `cpkv join` and the flags of `cpkv serve` for other hosts: one line, or keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from cp_shared_kv.cli import app as module
from cp_shared_kv.engine.control_keys import FILE_NAME, ControlKeys

pytestmark = pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")


def said(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Exit code and last line of a command."""
    monkeypatch.setattr("sys.argv", ["cpkv", *arguments])
    code = module.run()
    return code, capsys.readouterr().err.strip().splitlines()[-1]


def test_keys_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, line = said(["keys", f"{tmp_path}/keys"], monkeypatch, capsys)
    assert code == 0
    assert f"{tmp_path}/keys/{FILE_NAME}" in line
    keys = ControlKeys.load(tmp_path / "keys")
    assert keys.secret.decode() not in line
    code, line = said(["keys", f"{tmp_path}/keys"], monkeypatch, capsys)
    assert code == 1
    assert "there are keys already" in line
    assert ControlKeys.load(tmp_path / "keys") == keys


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--model-path=demo", "--control-host=10.0.0.5"], "cpkv keys"),
        (["serve", "--model-path=demo", "--control-keys={open}"], "--control-host"),
        (["join", "10.0.0.5:30001", "--control-host=10.0.0.6", "--control-keys={none}"], "no keys"),
        (["join", "10.0.0.5:30001", "--control-host=10.0.0.6", "--control-keys={open}"], "0644"),
        (["join", "10.0.0.5", "--control-host=10.0.0.6", "--control-keys={good}"], "HOST:PORT"),
        (["join", "10.0.0.5:1", "--control-host=0.0.0.0", "--control-keys={good}"], "--control-h"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line_before_anything_starts(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("good", "open"):
        ControlKeys.create(tmp_path / name)
    (tmp_path / "open" / FILE_NAME).chmod(0o644)
    places = {name: str(tmp_path / name) for name in ("good", "open", "none")}
    filled = [argument.format(**places) for argument in arguments]
    code, line = said(filled, monkeypatch, capsys)
    assert code == 1
    assert line.startswith("cpkv: ")
    assert named in line

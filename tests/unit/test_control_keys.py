"""The keys of a cluster: made once, for their owner alone, and never shown."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from cp_shared_kv.engine.control_keys import FILE_NAME, ControlKeys
from cp_shared_kv.errors import ConfigError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "deep" / "keys"
    ControlKeys.create(made)
    return made


def test_keys_are_made_for_their_owner_alone(directory: Path) -> None:
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / FILE_NAME).stat().st_mode) == 0o600
    keys = ControlKeys.load(directory)
    assert len(keys.public) == len(keys.secret) == 40
    assert keys == ControlKeys.load(directory)


def test_two_clusters_never_have_the_same_keys(directory: Path, tmp_path: Path) -> None:
    ControlKeys.create(tmp_path / "others")
    assert ControlKeys.load(directory) != ControlKeys.load(tmp_path / "others")


def test_keys_that_exist_are_never_replaced(directory: Path) -> None:
    before = (directory / FILE_NAME).read_bytes()
    with pytest.raises(ConfigError, match="there are keys already"):
        ControlKeys.create(directory)
    assert (directory / FILE_NAME).read_bytes() == before


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=str(tmp_path / "file")):
        ControlKeys.create(tmp_path / "file" / "keys")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o610])
def test_keys_that_others_can_read_are_refused(directory: Path, mode: int) -> None:
    (directory / FILE_NAME).chmod(mode)
    with pytest.raises(ConfigError, match=rf"can be read by others.*{mode:04o}.*0600"):
        ControlKeys.load(directory)


def test_keys_are_refused_that_are_none(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there are no keys.*cpkv keys"):
        ControlKeys.load(tmp_path / "nowhere")
    (tmp_path / "odd" / FILE_NAME).mkdir(parents=True)
    with pytest.raises(ConfigError, match="not a file of keys"):
        ControlKeys.load(tmp_path / "odd")
    file = directory / FILE_NAME
    whole = file.read_text()
    other = tmp_path / "other"
    ControlKeys.create(other)
    theirs = (other / FILE_NAME).read_text().splitlines()[-1]
    ours = whole.splitlines()
    for damaged in (
        "",
        "\0\xff",
        "\n".join(ours[:-1]),  # without the secret half
        "\n".join([*ours[:-1], theirs]),  # another pair's
        whole.replace('secret-key = "', 'secret-key = "xx'),
        whole + "#" * 10_000,
    ):
        file.write_text(damaged, encoding="latin-1")
        with pytest.raises(ConfigError, match="keys"):
            ControlKeys.load(directory)
    file.write_text(whole)
    assert ControlKeys.load(directory)


def test_keys_do_not_show(directory: Path) -> None:
    keys = ControlKeys.load(directory)
    shown = f"{keys} {keys!r}"
    assert keys.public.decode() not in shown
    assert keys.secret.decode() not in shown

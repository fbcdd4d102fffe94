"""The benchmark of a group of eight: which parts run, and that a run goes on where it stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import Measurement, eight


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the parts that were run, instead of running them."""
    names: list[str] = []

    def part(name: str) -> None:
        def run(options: eight.Options) -> Measurement:
            names.append(name)
            return Measurement(options.sizes, {"all": [1.0]}, figures={"part": name})

        monkeypatch.setitem(eight.PARTS, name, run)

    for name in list(eight.PARTS):
        part(name)
    return names


def run(tmp_path: Path, *arguments: str, commit: str = "abc") -> int:
    return eight.main([*arguments, "--results", str(tmp_path), "--commit", commit])


def test_a_part_that_has_its_result_is_not_run_again(ran: list[str], tmp_path: Path) -> None:
    assert run(tmp_path, "plan", "--device", "cpu") == 0
    assert run(tmp_path, "--device", "cpu") == 0
    assert ran == ["plan", "equal"]
    run(tmp_path, "plan", "--device", "cpu", "--again")
    assert ran[2:] == ["plan"]


@pytest.mark.parametrize(
    "change", [["--ranks", "4"], ["--tokens-per-rank", "64"], ["--layers", "2"]]
)
def test_the_result_of_another_size_or_commit_does_not_count(
    ran: list[str], tmp_path: Path, change: list[str]
) -> None:
    run(tmp_path, "plan", "--device", "cpu")
    run(tmp_path, "plan", "--device", "cpu", *change)
    run(tmp_path, "plan", "--device", "cpu", commit="def")
    assert ran == ["plan"] * 3


def test_a_cpu_has_no_parts_for_gpus_and_says_so(
    ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "ttft", "--device", "cpu")
    assert "no part ttft on cpu; there are: equal, plan" in capsys.readouterr().err
    assert ran == []

"""What `cpkv simulate` refuses, and that no file is lost by it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from cp_shared_kv.cli import simulate

from .conftest import Command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--conversation-every SECONDS"),
        (("--users", "1", "--pool-multipliers", "16"), "the ranks that can share pages"),
        (
            ("--users", "1", "--max-total-tokens", "10"),
            "--max-total-tokens is less than one page: 10; allowed: at least --page-size 64\n",
        ),
        (
            ("--users", "1", "--descriptors", "--decode-max-total-tokens", "10"),
            "--decode-max-total-tokens is less than one page: 10",
        ),
        (("--users", "1", "--gpu-results", "nowhere.json"), "--gpu-results cannot be read"),
        (("--users", "1", "--longest-think", "-1"), "--longest-think"),
        (("--users", "1", "--longest-think", "nan"), "--longest-think"),
        (("--users", "1", "--decode-ms-per-token", "nan"), "--decode-ms-per-token"),
        (("--users", "1", "--seed", "-1"), "--seed"),
        (("--users", "1", "--context-length", "0"), "--context-length"),
        (("--users", "1", "--cp-size", "0"), "--attention-context-parallel-size"),
        (("--users", "1", "--page-size", "0", "--max-total-tokens", "64"), "--page-size"),
        (("--users", "1", "--descriptors", "--decode-max-total-tokens", "0"), "--decode-max"),
        (("--users", "1", "--decode-max-total-tokens", "64"), "add --descriptors"),
        (("--users", "1", "--speed", "2"), "--speed has no effect here"),
        (("--users", "1", "--conversation-every", "2"), "drop --users for an open loop"),
        (("--conversation-every", "nan"), "--conversation-every is out of range"),
        (("--conversation-every", "1", "--speed", "inf"), "--speed is out of range"),
        (("--conversation-every", "1", "--ramp", "5"), "--ramp has no effect here"),
        (("--conversation-every", "1", "--longest-think", "5"), "--users for a closed loop"),
        (("--users", "1", "--results", "/dev/null/x"), "--results cannot be written"),
        (("--users", "1,99999999999999999999"), "--users is out of range: 99999999999999999999; "),
        (("--users", "1", "--prefill-groups", "999999999"), "allowed: 1 to 4096"),
        (("--users", "1", "--model", "deepseek-v3.2", "--gpu", "h20"), "leave no room"),
    ],
)
def test_what_simulate_refuses_is_one_line_that_says_what_to_change(
    cpkv: Command, trace: Path, arguments: tuple[str, ...], said: str
) -> None:
    code, _, err = cpkv("simulate", trace, "--requests", "2", *arguments)
    assert code == 1
    assert said in err
    assert err.startswith("cpkv: ")


def test_weights_that_do_not_fit_are_refused_with_flags_that_simulate_has(
    cpkv: Command, trace: Path
) -> None:
    code, _, err = cpkv("simulate", trace, "--users", "1", "--gpu", "h20")
    assert code == 1
    assert err == (
        "cpkv: the weights of a rank leave no room for KV: 103.6 GiB of weights; allowed: less "
        "than 86.0 GiB (0.9 of the GPU's memory); to change it: give --max-total-tokens, another "
        "--gpu or another --cp-size\n"
    )


@pytest.mark.parametrize("flag", ["--results", "--plots"])
@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x"])
def test_a_place_that_takes_no_results_is_refused_before_anything_is_simulated(
    cpkv: Command, trace: Path, monkeypatch: pytest.MonkeyPatch, flag: str, place: str
) -> None:
    monkeypatch.setattr(simulate, "run_sweep", lambda *_: pytest.fail("it was simulated"))
    code, _, err = cpkv("simulate", trace, "--users", "1", flag, place)
    assert code == 1
    assert err.startswith(f"cpkv: {flag} cannot be written: {place} (")


def test_a_file_of_results_stays_until_there_are_others(
    cpkv: Command, trace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stopped(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "run_sweep", stopped)
    for place in (tmp_path / "old.json", tmp_path / "new.json"):
        (tmp_path / "old.json").write_text("old")
        assert cpkv("simulate", trace, "--users", "1", "--results", place)[0] == 130
    assert (tmp_path / "old.json").read_text() == "old"
    assert not (tmp_path / "new.json").exists()


def test_results_never_replace_what_they_are_made_from(
    cpkv: Command, trace: Path, tmp_path: Path
) -> None:
    (link := tmp_path / "link.json").symlink_to(trace)
    before = trace.read_text()
    for place in (trace, link):
        code, _, err = cpkv("simulate", trace, "--users", "1", "--results", place)
        assert code == 1
        assert "allowed: another file than those it is made from" in err
    assert trace.read_text() == before


def test_a_pipe_that_nobody_reads_is_not_waited_for(
    cpkv: Command, trace: Path, tmp_path: Path
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    code, _, err = cpkv("simulate", trace, "--users", "1", "--results", pipe)
    assert code == 1
    assert err.startswith("cpkv: --results cannot be written")


def test_a_trace_that_is_wrong_is_refused_by_its_line(cpkv: Command, trace: Path) -> None:
    trace.write_text(trace.read_text() + '\n{"reqs": []}\n')
    code, _, err = cpkv("simulate", trace, "--users", "1")
    assert code == 1
    assert "small.jsonl, line 3" in err

"""`cpkv plan` and `cpkv simulate` as a user runs them, on traces of a few requests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cp_shared_kv.cli import simulate
from cp_shared_kv.planner.model_catalogue import BUILT_IN
from cp_shared_kv.planner.whole_cells import short_count

Command = Callable[..., tuple[int, str, str]]


# plan --------------------------------------------------------------------------------------------


def test_plan_shows_three_arrangements_side_by_side(cpkv: Command) -> None:
    code, out, _ = cpkv("plan", "glm-5", "--kv-budget-gib", "22.145", "--lengths", "8192, 131072")
    assert code == 0
    assert "replicated   layer split      shared" in out
    assert "237,312" in out
    assert "1,898,496" in out
    assert "prompts of 131,072 at once" in out


@pytest.mark.parametrize("columns", [30, 60, 120])
def test_a_narrow_terminal_cuts_no_figure(
    cpkv: Command, trace: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    plan = cpkv("plan", "glm-5.2", "--gpu", "h200")[1]
    for figure in ("140.40 GiB", "1,825,088", "1,866,240", "1,048,575"):
        assert figure in plan
    replay = cpkv("simulate", trace, "--users", "1", "--requests", "3", "--descriptors")[1]
    summary = cpkv("trace", "summarise", trace)[1]
    assert "…" not in plan + replay + summary


def test_plan_says_whose_split_of_weights_it_has(cpkv: Command) -> None:
    whole = "1,384.65 GiB in bf16"  # 743.4 billion parameters without multi-token prediction
    note = " ".join(cpkv("plan", "glm-5.2", "--gpu", "h200")[1].split())
    assert "split as in SGLang's servers" in note
    assert f"on each rank, {whole}: this model does not fit it." in note
    assert "SGLang" not in cpkv("plan", "glm-5.2", "--kv-budget-gib", "20")[1]  # no weights in it
    assert "does not fit" not in cpkv("plan", "glm-5.2", "--gpu-memory-gib", "1400")[1]


def test_plan_as_json_has_every_figure(cpkv: Command) -> None:
    code, out, _ = cpkv("plan", "glm-5.2", "--gpu", "h200", "--json", "--lengths", "65536")
    assert code == 0
    found = json.loads(out)
    assert (found["model"], found["gpu"], found["cp_size"]) == ("glm-5.2", "h200", 8)
    shared = found["arrangements"][-1]
    assert shared["arrangement"] == "shared"
    assert shared["logical_tokens"] == 8 * shared["physical_tokens"]
    assert shared["concurrent_requests"]["65536"] == shared["logical_tokens"] // 65_536
    assert (
        found["weight_bytes"] + shared["pool_bytes"] + shared["scratch_bytes"]
        <= (found["usable_bytes"])
    )
    assert found["versions"]["cp-shared-kv"]
    assert "commit" in found
    assert found["settings"]["kv_cache_dtype"] == "bf16"
    assert (found["settings"]["page_size"], found["settings"]["expert_ranks"]) == (64, 8)


def test_plan_takes_a_config_json(cpkv: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BUILT_IN["deepseek-v3.2"]))
    by_file = cpkv("plan", tmp_path, "--gpu-memory-gib", "141", "--json")[1]
    by_name = cpkv("plan", "deepseek-v3.2", "--gpu-memory-gib", "141", "--json")[1]
    assert json.loads(by_file)["arrangements"] == json.loads(by_name)["arrangements"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("glm-5",), "one of --gpu, --gpu-memory-gib and --kv-budget-gib"),
        (("glm-5",), "say --gpu h200, for example; known are h20, h20-3e, h100"),
        (("glm-5", "--gpu", "h200", "--gpu-memory-gib", "80"), "drop one of the two"),
        (("glm-5", "--gpu", "h200", "--kv-budget-gib", "20"), "not clear"),
        (("deepseek-v3.2", "--gpu", "h20"), "--expert-parallel-size"),
        (("no-such-model", "--gpu", "h200"), "deepseek-v3.2, glm-5, glm-5.2"),
        (("glm-5", "--gpu", "abacus"), "h20-3e"),
        (("glm-5", "--gpu", "h200", "--page-size", "60"), "not a power of two"),
        (("glm-5", "--gpu-memory-gib", "nan"), "--gpu-memory-gib is out of range: nan"),
        (("glm-5", "--kv-budget-gib", "inf"), "--kv-budget-gib is out of range: inf"),
        (("glm-5", "--kv-budget-gib", "-1"), "--kv-budget-gib is out of range: -1"),
        (("glm-5", "--kv-budget-gib", "1e300"), "--kv-budget-gib is out of range: 1e+300; allowed"),
        (("glm-5", "--gpu-memory-gib", "1e300"), "above 0, at most 1048576"),
        (("glm-5", "--gpu", "h200", "--expert-parallel-size", "0"), "--expert-parallel-size"),
        (("glm-5", "--gpu", "h200", "--context-length", "0"), "--context-length is out of range"),
        (("glm-5", "--gpu", "h200", "--cp-size", "0"), "--attention-context-parallel-size"),
        (("glm-5", "--gpu", "h200", "--lengths="), "--lengths is empty"),
    ],
)
def test_what_plan_refuses_is_one_line_that_says_what_to_change(
    cpkv: Command, arguments: tuple[str, ...], said: str
) -> None:
    code, out, err = cpkv("plan", *arguments)
    assert (code, out) == (1, "")
    assert said in err
    assert err.startswith("cpkv: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("lengths", ["8,x", "0", "-3", "1.5"])
def test_a_list_that_is_none_is_refused(cpkv: Command, lengths: str) -> None:
    code, _, err = cpkv("plan", "glm-5", "--gpu", "h200", f"--lengths={lengths}")
    assert code == 2
    assert "--lengths" in err
    assert "no whole number above 0" in err


# simulate ----------------------------------------------------------------------------------------


def test_simulate_shows_every_case_and_writes_what_it_found(
    cpkv: Command, trace: Path, tmp_path: Path
) -> None:
    file = tmp_path / "deep" / "results.json"
    code, out, _ = cpkv(
        "simulate", trace, "--users", "1,2", "--pool-multipliers", "1,8", "--requests", "6",
        "--descriptors", "--results", file,
    )  # fmt: skip
    assert code == 0
    for heading in (
        "hit rate",
        "refused",
        "queue p99",
        "first token p50",
        "busiest p99",
        "striped",
    ):
        assert heading in out
    found = json.loads(file.read_text())
    assert [(row["multiplier"], row["users"]) for row in found["cases"]] == [
        (1, 1), (8, 1), (1, 2), (8, 2),
    ]  # fmt: skip
    for row in found["cases"]:
        assert row["requests"] == 6
        assert row["hit_rate"] == pytest.approx((10 + 11) / 33, abs=1e-4)
        assert row["descriptors"]["transfers"] == 6
    assert found["settings"]["rates"]["source"].startswith("assumed")
    assert found["trace"] == {
        "format": "agentic", "conversations": 2, "requests": 6, "block_tokens": 64,
    }  # fmt: skip
    assert found["versions"]["numpy"]


def test_simulate_says_what_its_figures_rest_on(cpkv: Command, trace: Path) -> None:
    arguments = ("simulate", trace, "--users", "1", "--requests", "6")
    said = " ".join(cpkv(*arguments)[1].split())
    assert said.startswith(
        "small.jsonl, 6 requests. Assumed: glm-5.2 on 8 h200, 233,280 tokens a rank (1x); decode "
        "takes 20 ms a token; rates: assumed parts of the GPU's peaks, not measured. cache"
    )
    said = " ".join(
        cpkv(*arguments, "--max-total-tokens", "640", "--answers", "recorded")[1].split()
    )
    assert "640 tokens a rank (1x); answers take as long as recorded" in said


def test_few_tokens_are_counted_one_by_one(cpkv: Command, trace: Path) -> None:
    out = cpkv("simulate", trace, "--users", "1", "--requests", "3")[1]
    assert "768" in out  # computed: 12 pages of 33
    assert "1,344" in out  # saved: the other 21
    assert re.search(r"prompt tokens +4,224 ", cpkv("trace", "summarise", trace)[1])
    assert [short_count(n) for n in (0, 9_999, 10_000, 9_999_499, 2_356_600_000)] == [
        "0", "9,999", "10 k", "9,999 k", "2,357 M",
    ]  # fmt: skip


def test_a_trace_without_blocks_is_said_to_be_one(cpkv: Command, trace: Path) -> None:
    for command in (("simulate",), ("trace", "summarise"), ("trace", "validate")):
        users = ("--users", "1", "--requests", "1") if command == ("simulate",) else ()
        assert "no block ids" not in cpkv(*command, trace, *users)[1]
    path = trace.with_name("lengths.csv")
    path.write_text("arrival_seconds,prompt_tokens,output_tokens\n0,6400,5\n1,640,5\n")
    for command in (("simulate",), ("trace", "summarise"), ("trace", "validate")):
        code, out, _ = cpkv(*command, path)
        assert code == 0
        assert "no block ids, so nothing can be found in a cache" in " ".join(out.split())


def test_simulate_writes_json_to_stdout_and_nothing_else(cpkv: Command, trace: Path) -> None:
    code, out, _ = cpkv("simulate", trace, "--users", "1", "--requests", "3", "--json")
    assert code == 0
    assert len(json.loads(out)["cases"]) == 4


def test_simulate_draws_pictures(cpkv: Command, trace: Path, tmp_path: Path) -> None:
    plots = tmp_path / "plots"
    arguments = ("simulate", trace, "--users", "1,2", "--requests", "6", "--descriptors")
    code, _, err = cpkv(*arguments, "--plots", plots)
    assert code == 0
    names = {"hit-rate", "first-token", "owner-balance", "descriptors"}
    assert {path.stem for path in plots.glob("*.svg")} == names
    assert err.count("drew ") == 4
    texts = {path.stem: path.read_text() for path in plots.glob("*.svg")}
    assert all(ElementTree.fromstring(text).tag.endswith("svg") for text in texts.values())
    cpkv(*arguments, "--plots", plots)
    assert {path.stem: path.read_text() for path in plots.glob("*.svg")} == texts


def test_a_terminal_is_shown_how_far_it_is_and_how_long_it_will_take(
    cpkv: Command, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("simulate", trace, "--users", "1", "--requests", "128", "--pool-multipliers", "8")
    assert cpkv(*arguments)[2] == ""  # not into a pipe or a log
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = cpkv(*arguments)[2]
    assert "8x, 1 users" in shown
    assert "100 %" in shown
    assert re.search(r"left:\S* \S*(\d|-):", shown)


def test_a_case_that_refuses_every_request_leaves_a_gap_in_the_pictures(
    cpkv: Command, trace: Path, tmp_path: Path
) -> None:
    code, out, _ = cpkv(
        "simulate", trace, "--users", "1", "--requests", "3", "--max-total-tokens", "64",
        "--pool-multipliers", "1,8", "--plots", tmp_path / "plots",
    )  # fmt: skip
    assert code == 0
    assert "refused" in out
    assert (tmp_path / "plots/first-token.svg").is_file()


def test_simulate_replays_at_recorded_times(cpkv: Command, tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("arrival_seconds,prompt_tokens,output_tokens\n0,6400,5\n1,640,5\n")
    code, out, _ = cpkv("simulate", path, "--pool-multipliers", "8", "--json")
    assert code == 0
    (row,) = json.loads(out)["cases"]
    assert row["users"] is None
    assert (row["requests"], row["saved_tokens"], row["computed_tokens"]) == (2, 0, 7040)


def test_simulate_takes_rates_of_a_results_file(cpkv: Command, trace: Path, tmp_path: Path) -> None:
    def first_token(**rates: float) -> float:
        path = tmp_path / "rates.json"
        path.write_text(json.dumps({"rates": rates}))
        out = cpkv(
            "simulate", trace, "--users", "1", "--requests", "1", "--pool-multipliers", "1",
            "--gpu-results", path, "--json",
        )[1]  # fmt: skip
        found = json.loads(out)
        assert found["settings"]["rates"]["source"] == "rates.json, the rest assumed"
        return found["cases"][0]["first_token_seconds"]["p50"]

    assert first_token(hbm_bytes=1e12) > first_token(hbm_bytes=4e12)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--conversation-every SECONDS"),
        (("--users", "1", "--pool-multipliers", "16"), "the ranks that can share pages"),
        (("--users", "1", "--page-size", "1024", "--max-total-tokens", "10"), "no stripe"),
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


# help --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (
            "plan",
            ("cpkv plan glm-5.2 --gpu h200", "--kv-budget-gib", "layer split", "that of 141 GB"),
        ),
        ("simulate", ("cpkv simulate agentic.jsonl --users 16", "--pool-multipliers", "stated")),
        ("trace", ("validate", "summarise")),
    ],
)
def test_help_teaches_by_example_and_without_torch(command: str, shown: tuple[str, ...]) -> None:
    program = (
        "import sys; from cp_shared_kv.cli.app import run; "
        f"sys.argv = ['cpkv', '{command}', '--help']; run(); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for text in shown:
        assert text in done.stdout


def test_planning_and_simulating_need_no_torch(trace: Path) -> None:
    commands: list[list[Any]] = [
        ["plan", "glm-5.2", "--gpu", "h200"],
        ["simulate", str(trace), "--users", "1", "--requests", "2", "--descriptors"],
        ["trace", "summarise", str(trace)],
    ]
    for command in commands:
        program = (
            "import sys; from cp_shared_kv.cli.app import run; "
            f"sys.argv = ['cpkv', *{command}]; assert run() == 0; assert 'torch' not in sys.modules"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr

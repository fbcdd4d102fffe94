"""`cpkv simulate` as a user runs it, on traces of a few requests: what it shows and writes."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from cp_shared_kv.planner.whole_cells import short_count

from .conftest import Command


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    """Three requests, each of which begins like the one before."""
    path = tmp_path / "mooncake.jsonl"
    lines = [
        {
            "timestamp": 1000 * blocks,
            "input_length": 512 * blocks,
            "output_length": 4,
            "hash_ids": list(range(blocks)),
        }
        for blocks in (1, 2, 3)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


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


def test_requests_with_blocks_of_the_whole_file_are_replayed_once_by_default(
    cpkv: Command, mooncake: Path
) -> None:
    arguments = ("simulate", mooncake, "--users", "2", "--pool-multipliers", "8")
    found = json.loads(cpkv(*arguments, "--json")[1])
    bound = json.loads(cpkv("trace", "summarise", mooncake, "--json")[1])["reusable_fraction"]
    assert (found["settings"]["requests"], found["cases"][0]["requests"]) == (3, 3)
    assert found["cases"][0]["hit_rate"] <= bound
    assert found["notes"] == []
    assert "replayed" not in cpkv(*arguments)[1]


def test_more_requests_than_the_file_has_are_said_to_be_replays(
    cpkv: Command, mooncake: Path, trace: Path
) -> None:
    more = ("--users", "2", "--pool-multipliers", "8", "--requests", "7")
    note = (
        "Each of the file's 3 requests is replayed up to 3 times; what a second pass finds of the "
        "first counts as found."
    )
    assert json.loads(cpkv("simulate", mooncake, *more, "--json")[1])["notes"] == [note]
    assert note in " ".join(cpkv("simulate", mooncake, *more)[1].split())
    # Conversations are new each time, and an open loop never begins again.
    assert json.loads(cpkv("simulate", trace, *more, "--json")[1])["notes"] == []
    assert "replayed" not in cpkv("simulate", mooncake, "--requests", "7")[1]


def test_few_tokens_are_counted_one_by_one(cpkv: Command, trace: Path) -> None:
    out = cpkv("simulate", trace, "--users", "1", "--requests", "3")[1]
    assert "768" in out  # computed: 12 pages of 33
    assert "1,344" in out  # saved: the other 21
    assert re.search(r"prompt tokens +4,224 ", cpkv("trace", "summarise", trace)[1])
    assert [short_count(n) for n in (0, 9_999, 10_000, 9_999_499, 2_356_600_000)] == [
        "0", "9,999", "10 k", "9,999 k", "2,357 M",
    ]  # fmt: skip


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

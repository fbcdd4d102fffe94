"""Traces: the three formats, what is refused and where, and keys of pages out of blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cp_shared_kv.errors import ConfigError, TraceError
from cp_shared_kv.planner.trace import Trace
from cp_shared_kv.planner.trace_files import Validation, read_trace, validate
from cp_shared_kv.planner.trace_json import runs_of
from cp_shared_kv.planner.trace_keys import TraceKeys
from cp_shared_kv.planner.trace_summary import summarise

AGENTIC = {
    "id": "one",
    "block_size": 64,
    "reqs": [
        [0.0, 130, 7, [[1, 2]], 0, 3.5, 0.0],
        [9.0, 200, 8, [[1, 2], [7, 1]], 1, None, 2.0],
    ],
}
MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [4, 9]}


def trace_of(path: Path, *lines: Any) -> Trace:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return read_trace(path)


def changed(line: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return line | fields


# Formats -----------------------------------------------------------------------------------------


def test_agentic_conversations(tmp_path: Path) -> None:
    other = changed(AGENTIC, reqs=[[0.0, 64, 1, [[1, 1]], 0, 1.0, 0.0]])
    trace = trace_of(tmp_path / "a.jsonl", AGENTIC, "", other)
    assert (trace.format, trace.block_tokens) == ("agentic", 64)
    assert (trace.conversations, trace.requests) == (2, 3)
    assert [list(trace.rows(number)) for number in range(2)] == [[0, 1], [2]]
    assert trace.prompt_tokens.tolist() == [130, 200, 64]
    assert trace.at_seconds.tolist() == [0.0, 9.0, 0.0]
    assert trace.think_seconds.tolist() == [0.0, 2.0, 0.0]
    assert trace.answer_seconds[0] == 3.5
    assert np.isnan(trace.answer_seconds[1])
    assert trace.local_blocks
    assert not trace.absolute_times


def test_mooncake_requests(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "m.jsonl", MOONCAKE, changed(MOONCAKE, timestamp=2500.5))
    assert (trace.format, trace.block_tokens) == ("mooncake", 512)
    assert (trace.conversations, trace.requests) == (2, 2)
    assert trace.at_seconds.tolist() == [1.5, 2.5005]
    assert not trace.has_answer_times
    assert trace.absolute_times


@pytest.mark.parametrize(
    "lines",
    [
        ("arrival_seconds,prompt_tokens,output_tokens", "5,10,3", "6.5,70,0"),
        ("output_tokens,prompt_tokens,arrival_seconds", "3,10,5", "0,70,6.5"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:15:46.6805900,10,3",
            "2023-11-16 18:15:48.1805900,70,0",
        ),
        (
            "Timestamp,Session ID,Model,Request tokens,Response tokens",
            "5,x,gpt,10,3",
            "6.5,y,gpt,70,0",
        ),
    ],
)
def test_lengths_in_csv_by_the_columns_of_known_traces(tmp_path: Path, lines: Any) -> None:
    trace = trace_of(tmp_path / "l.csv", *lines)
    assert trace.format == "lengths"
    assert trace.at_seconds.tolist() == [0.0, 1.5]
    assert trace.prompt_tokens.tolist() == [10, 70]
    assert trace.output_tokens.tolist() == [3, 0]
    assert len(set(keys_of(trace, 64))) == 1  # 70 tokens fill one page, 10 none


def test_prompts_of_a_csv_share_nothing(tmp_path: Path) -> None:
    rows = ["0,640,1"] * 5
    trace = trace_of(tmp_path / "l.csv", "arrival_seconds,prompt_tokens,output_tokens", *rows)
    keys = keys_of(trace, 64)
    assert len(keys) == len(set(keys)) == 50


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reqs", "named"),
    [
        ([[0.0, "x", 7, [[1, 2]]]], "reqs"),
        ([[0.0, 0, 7, []]], "reqs"),
        ([[0.0, 130, -1, [[1, 2]]]], "reqs"),
        ([[-1.0, 130, 1, [[1, 2]]]], "reqs"),
        ([[0.0, 130, 7, [[1, 4]]]], "do not cover"),
        ([[0.0, 130, 7, [[1, 1]]]], "do not cover"),
        ([[0.0, 130, 7, [[1, 0], [2, 2]]]], "reqs"),
        ([[0.0, 130, 7, [[1 << 31, 2]]]], "reqs"),
        ([[0.0, 130]], "reqs"),
        ([], "reqs"),
    ],
)
def test_a_conversation_that_is_wrong_is_refused_by_its_line(
    tmp_path: Path, reqs: Any, named: str
) -> None:
    with pytest.raises(TraceError, match=rf"line 2.*{named}"):
        trace_of(tmp_path / "a.jsonl", AGENTIC, changed(AGENTIC, reqs=reqs))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"timestamp": 1499}, "goes back"),
        ({"timestamp": "now"}, "timestamp"),
        ({"input_length": 0}, "input_length"),
        ({"input_length": 1600}, "do not cover"),
        ({"hash_ids": [1.5, 2]}, "hash_ids"),
        ({"hash_ids": None}, "hash_ids"),
        ({"output_length": -1}, "output_length"),
    ],
)
def test_a_request_that_is_wrong_is_refused_by_its_line(
    tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(TraceError, match=rf"line 2.*{named}"):
        trace_of(tmp_path / "m.jsonl", MOONCAKE, changed(MOONCAKE, **fields))


@pytest.mark.parametrize(
    "line", ["{", '{"more": ' + "[" * 100_000, '{"timestamp": 1}', "nonsense", '"reqs"', "[1, 2]"]
)
def test_a_line_that_is_no_request_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    with pytest.raises(TraceError, match="line 2"):
        trace_of(tmp_path / "m.jsonl", MOONCAKE, line)


def test_blocks_of_two_lengths_are_refused(tmp_path: Path) -> None:
    other = changed(AGENTIC, block_size=32, reqs=[[0.0, 32, 1, [[1, 1]]]])
    with pytest.raises(TraceError, match="line 2: block_size differs"):
        trace_of(tmp_path / "a.jsonl", AGENTIC, other)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("x,10,3", "arrival_seconds"),
        ("nan,10,3", "arrival_seconds"),
        ("1,ten,3", "prompt_tokens"),
        ("1,0,3", "prompt_tokens"),
        ("1,10,-1", "output_tokens"),
        ("1,10", "output_tokens"),
        ("0.5,10,3", "goes back"),
    ],
)
def test_a_csv_row_that_is_wrong_is_refused_by_its_line(
    tmp_path: Path, row: str, named: str
) -> None:
    header = "arrival_seconds,prompt_tokens,output_tokens"
    with pytest.raises(TraceError, match=rf"line 3: .*{named}"):
        trace_of(tmp_path / "l.csv", header, "1,10,3", row)


def test_a_csv_without_a_column_is_refused_with_the_names_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no column for prompt.*ContextTokens|contexttokens"):
        trace_of(tmp_path / "l.csv", "arrival_seconds,length", "1,2")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"arrival_seconds,prompt_tokens,output_tokens"]
)
def test_a_file_without_a_request_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        read_trace(path)


@pytest.mark.parametrize("read", [read_trace, lambda path: validate(path, 20)])
def test_a_file_that_cannot_be_read_is_refused_with_its_path_once(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "nothing.jsonl"
    with pytest.raises(TraceError) as refused:
        read(path)
    assert str(refused.value) == f"the trace cannot be read: {path} (No such file or directory)"


@pytest.mark.parametrize(
    "content", ["", "# A page\nwith text\n", '{"model_type": "x"}\n', "[\n", "a,b\n1,2\n", "[1]\n"]
)
def test_a_file_that_is_no_trace_is_told_the_three_formats(tmp_path: Path, content: str) -> None:
    found = validation_of(tmp_path / "x", content)
    assert found.wrong_lines == 1
    said = str(found.errors[0])
    assert "x is no trace of a known format" in said
    for name in ("agentic conversations", "Mooncake's requests", "arrival_seconds"):
        assert name in said


def test_a_csv_field_without_end_is_refused_by_its_line(tmp_path: Path) -> None:
    header = "arrival_seconds,prompt_tokens,output_tokens"
    with pytest.raises(TraceError, match="line 3: field"):
        trace_of(tmp_path / "l.csv", header, "1,10,3", "1,10," + "3" * 200_000)


def test_a_csv_header_without_end_is_refused_by_its_line(tmp_path: Path) -> None:
    header = "arrival_seconds,prompt_tokens,output_tokens," + "a" * 140_000
    with pytest.raises(TraceError, match="line 1: field"):
        trace_of(tmp_path / "l.csv", header, "1,10,3,a")


def test_blank_lines_before_the_first_do_not_hide_the_format(tmp_path: Path) -> None:
    assert trace_of(tmp_path / "m.jsonl", "", " ", MOONCAKE).format == "mooncake"


# Validation --------------------------------------------------------------------------------------


def validation_of(path: Path, *lines: str, most_errors: int = 20) -> Validation:
    path.write_text("\n".join(lines))
    return validate(path, most_errors)


def test_validation_goes_on_behind_a_wrong_line_in_every_format(tmp_path: Path) -> None:
    agentic, mooncake = json.dumps(AGENTIC), json.dumps(MOONCAKE)
    uncovered = json.dumps(changed(AGENTIC, reqs=[[0.0, 130, 7, [[1, 4]]]]))
    back = json.dumps(changed(MOONCAKE, timestamp=3))
    header = "arrival_seconds,prompt_tokens,output_tokens"
    for lines in (
        (agentic, "nonsense", uncovered, agentic),
        (mooncake, "nonsense", back, mooncake),
        (header, "x,1,1", "1,0,1", "2,1,1"),
    ):
        found = validation_of(tmp_path / "trace", *lines)
        assert found.trace is None
        assert found.wrong_lines == 2
        assert ["line 2" in str(found.errors[0]), "line 3" in str(found.errors[1])] == [True, True]


def test_validation_keeps_the_first_errors_and_counts_all(tmp_path: Path) -> None:
    found = validation_of(tmp_path / "t", json.dumps(MOONCAKE), *["{"] * 50, most_errors=3)
    assert (len(found.errors), found.wrong_lines) == (3, 50)


def test_a_file_of_wrong_lines_alone_is_not_told_to_be_empty_too(tmp_path: Path) -> None:
    found = validation_of(tmp_path / "t", "{", "{")
    assert found.wrong_lines == 2
    assert not any("no request" in str(error) for error in found.errors)
    empty = validation_of(tmp_path / "t")
    assert empty.wrong_lines == 1


def test_what_validates_is_read(tmp_path: Path) -> None:
    found = validation_of(tmp_path / "t", json.dumps(AGENTIC))
    assert found.trace is not None
    assert found.trace.requests == 2
    assert (found.errors, found.wrong_lines) == ((), 0)


# Summaries ---------------------------------------------------------------------------------------


def test_a_summary_counts_what_a_cache_without_limit_finds(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "a.jsonl", AGENTIC, AGENTIC)
    found = summarise(trace, (130, 200))
    assert found.conversations == 2
    assert found.prompt_tokens_total == 660
    assert found.prompt_tokens["max"] == 200
    assert found.requests_per_conversation is not None
    assert found.requests_per_conversation["mean"] == 2
    assert found.distinct_blocks == 6  # blocks of the two conversations are not the same
    assert found.reusable_fraction == round(2 * 128 / 660, 4)
    assert found.longer_prompts == {130: 2, 200: 0}
    assert found.answer_seconds is not None
    assert found.answer_seconds["max"] == 3.5
    assert found.span_seconds is None


def test_a_summary_of_requests_without_conversations(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "m.jsonl", MOONCAKE, changed(MOONCAKE, timestamp=4500))
    found = summarise(trace, ())
    assert (found.conversations, found.think_seconds, found.answer_seconds) == (None, None, None)
    assert found.span_seconds == 3
    assert found.reusable_fraction == round(512 / 1200, 4)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8))
def test_reuse_is_the_longest_beginning_of_any_prompt_before(prompts: list[list[int]]) -> None:
    lines = [
        json.dumps(
            {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        )
        for ids in prompts
    ]
    with TemporaryDirectory() as directory:
        trace = trace_of(Path(directory) / "m.jsonl", *lines)
    reused = sum(
        max((common(ids, before) for before in prompts[:number]), default=0)
        for number, ids in enumerate(prompts)
    )
    blocks = sum(map(len, prompts))
    found = summarise(trace, ())
    assert found.reusable_fraction == round(reused / blocks, 4)
    assert found.distinct_blocks == blocks - reused


def common(ids: list[int], before: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(ids, before, strict=False)) if a != b),
        min(len(ids), len(before)),
    )


# Keys --------------------------------------------------------------------------------------------


def keys_of(trace: Trace, page_size: int, instance: int = 0) -> list[bytes]:
    keys = TraceKeys(trace, page_size)
    found = [keys.page_keys(row, instance) for row in range(trace.requests)]
    return [key.tobytes() for of_row in found for key in of_row]


def test_equal_blocks_of_one_conversation_are_equal_pages(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "a.jsonl", AGENTIC)
    first, second = (TraceKeys(trace, 64).page_keys(row, 3).tolist() for row in range(2))
    assert len(first) == 2
    assert len(second) == 3
    assert second[:2] == first


def test_another_instance_of_a_conversation_shares_nothing(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "a.jsonl", AGENTIC)
    assert not set(keys_of(trace, 64, 0)) & set(keys_of(trace, 64, 1))


def test_mooncakes_blocks_are_those_of_the_whole_file(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "m.jsonl", MOONCAKE, MOONCAKE)
    keys = TraceKeys(trace, 64)
    assert keys.page_keys(0, 0).tolist() == keys.page_keys(1, 1).tolist()
    assert len(keys.page_keys(0, 0)) == 600 // 64


@pytest.mark.parametrize("page_size", [16, 64, 128, 512])
def test_pages_of_another_size_than_the_blocks(tmp_path: Path, page_size: int) -> None:
    """Two pages are equal exactly where all of their tokens' blocks are."""
    rows = [[[1, 8]], [[1, 5], [9, 3]], [[1, 8], [20, 8]]]
    reqs = [[0.0, 64 * sum(n for _, n in runs), 1, runs] for runs in rows]
    trace = trace_of(tmp_path / "a.jsonl", changed(AGENTIC, reqs=reqs))
    keys = TraceKeys(trace, page_size)
    seen: dict[bytes, tuple[tuple[int, int], ...]] = {}
    for row, runs in enumerate(rows):
        blocks = [first + place for first, count in runs for place in range(count)]
        found = keys.page_keys(row, 0)
        assert len(found) == 64 * len(blocks) // page_size
        for page, key in enumerate(found):
            tokens = range(page * page_size, (page + 1) * page_size)
            content = tuple((blocks[token // 64], token % 64) for token in tokens)
            assert seen.setdefault(key.tobytes(), content) == content
    assert len(set(seen.values())) == len(seen)


def test_pages_that_do_not_go_with_the_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="divisors and multiples of 64"):
        TraceKeys(trace_of(tmp_path / "a.jsonl", AGENTIC), 48)


@given(st.lists(st.integers(0, 30), max_size=30))
def test_runs_are_the_ids_that_they_are_made_of(ids: list[int]) -> None:
    runs = list(runs_of(ids))
    assert [first + place for first, count in runs for place in range(count)] == ids
    assert all(before[0] + before[1] != after[0] for before, after in pairwise(runs))

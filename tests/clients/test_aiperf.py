"""NVIDIA's AIPerf, from PyPI: streamed chats, and a Mooncake trace at its own times."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cp_shared_kv.demo_model.cache import demo_checkpoint_directory
from cp_shared_kv.testing.running_cluster import Running

pytestmark = [pytest.mark.clients, pytest.mark.e2e]
REQUESTS = 12
OUTPUT_TOKENS = 12
Profile = Callable[[str, Sequence[str]], tuple[dict[str, Any], Any]]


@pytest.fixture
def profile(served: Running, environments: Path, run_client: Any, tmp_path: Path) -> Profile:
    """Runs aiperf profile; returns the client's own result, and what the server has counted."""

    def run(name: str, flags: Sequence[str]) -> tuple[dict[str, Any], Any]:
        command = [
            str(environments / "aiperf/bin/aiperf"),
            "profile",
            *("--model", "demo", "--url", served.url, "--streaming", "--ui", "none"),
            *("--tokenizer", str(demo_checkpoint_directory()), "--random-seed", "7"),
            *("--use-server-token-count", "--extra-inputs", "ignore_eos:true"),
            *("--artifact-dir", str(tmp_path)),
            *flags,
        ]
        counted = run_client(f"aiperf-{name}", command)
        return json.loads((tmp_path / "profile_export_aiperf.json").read_text()), counted

    return run


def assert_agree(told: dict[str, Any], counted: Any, requests: int) -> None:
    """All were answered, and what the client was told adds up to what the server has counted."""
    assert told["request_count"]["avg"] == counted.finished == requests
    assert counted.unfinished == 0
    assert told["error_summary"] == []
    assert told["total_usage_prompt_tokens"]["avg"] == counted.prompt_tokens > 0
    assert told["total_usage_completion_tokens"]["avg"] == counted.generated_tokens > 0
    assert told["total_usage_prompt_cache_read_tokens"]["avg"] == counted.cached_tokens


def test_streamed_chats_are_all_answered_and_counted_alike(
    profile: Profile,
) -> None:
    flags = [
        *("--endpoint-type", "chat", "--concurrency", "4", "--request-count", str(REQUESTS)),
        *("--isl", "200", "--osl", str(OUTPUT_TOKENS)),
    ]
    told, counted = profile("chat", flags)
    assert_agree(told, counted, REQUESTS)
    assert counted.generated_tokens == REQUESTS * OUTPUT_TOKENS


def test_a_mooncake_trace_is_replayed_and_its_prefixes_are_found(
    profile: Profile, small_trace: Path
) -> None:
    flags = [
        *("--endpoint-type", "completions", "--input-file", str(small_trace)),
        *("--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
    ]
    told, counted = profile("mooncake", flags)
    trace = [json.loads(line) for line in small_trace.read_text().splitlines()]
    assert_agree(told, counted, len(trace))
    assert counted.prompt_tokens == sum(request["input_length"] for request in trace)
    assert counted.generated_tokens == sum(request["output_length"] for request in trace)
    assert counted.cached_tokens > 0

"""SGLang's bench_serving, from its wheel: its three ways to ask, its random and Mooncake data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cp_shared_kv.demo_model.cache import demo_checkpoint_directory
from cp_shared_kv.testing.running_cluster import Running

pytestmark = [pytest.mark.clients, pytest.mark.e2e]
REQUESTS = 8
TEMPLATE_TOKENS = len("[user]\n" + "E" + "\n[assistant]\n")
"""What the demo's template adds to one message; its end is one token."""
Bench = Callable[[str, Sequence[str]], tuple[dict[str, Any], Any]]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in ShareGPT's format, which `random` takes its prompts' text from."""
    text = (ROOT / "LICENSE").read_text()
    turns = [{"value": text[at : at + 400]} for at in range(0, 20 * 500, 500)]
    path = tmp_path_factory.mktemp("sharegpt") / "conversations.json"
    path.write_text(json.dumps([{"conversations": [turn, turn]} for turn in turns]))
    return path


@pytest.fixture
def bench(served: Running, environments: Path, run_client: Any, tmp_path: Path) -> Bench:
    """Runs bench_serving; returns the client's own result, and what the server has counted."""

    def run(name: str, flags: Sequence[str]) -> tuple[dict[str, Any], Any]:
        result = tmp_path / f"{name}.jsonl"
        command = [
            str(environments / "sglang/bin/python"),
            "-m",
            "sglang.bench_serving",
            # A model's name alone would be looked for at Hugging Face.
            *("--model", str(demo_checkpoint_directory()), "--served-model-name", "demo"),
            *("--base-url", served.url, "--warmup-requests", "0", "--disable-tqdm"),
            *("--output-details", "--output-file", str(result)),
            *flags,
        ]
        counted = run_client(f"bench_serving-{name}", command)
        (line,) = result.read_text().splitlines()
        return json.loads(line), counted

    return run


def assert_agree(told: dict[str, Any], counted: Any, requests: int) -> None:
    """All were answered, and client and server count the same tokens."""
    assert told["completed"] == counted.finished == requests
    assert counted.unfinished == 0
    assert told["errors"] == [""] * requests
    assert told["total_input_tokens"] == counted.prompt_tokens > 0
    assert told["total_output_tokens"] == counted.generated_tokens > 0


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_random_prompts_are_all_answered_and_counted_alike(
    bench: Bench, conversations: Path, backend: str
) -> None:
    flags = [
        *("--backend", backend, "--dataset-name", "random", "--dataset-path", str(conversations)),
        *("--num-prompts", str(REQUESTS), "--random-input-len", "300"),
        *("--random-output-len", "16"),
    ]
    told, counted = bench(f"random-{backend}", flags)
    if backend == "sglang-oai-chat":
        # The client counts the text, the server the chat that the template makes of it.
        told["total_input_tokens"] += REQUESTS * TEMPLATE_TOKENS
    assert_agree(told, counted, REQUESTS)


def test_token_ids_are_a_prompt_and_log_probabilities_are_told(bench: Bench) -> None:
    flags = [
        *("--backend", "sglang", "--dataset-name", "random-ids", "--tokenize-prompt"),
        *("--num-prompts", str(REQUESTS), "--random-input-len", "300"),
        *("--random-output-len", "16", "--return-logprob", "--top-logprobs-num", "2"),
    ]
    assert_agree(*bench("random-ids", flags), REQUESTS)


def test_a_mooncake_trace_is_replayed_and_its_prefixes_are_found(
    bench: Bench, environments: Path, small_trace: Path
) -> None:
    flags = [
        *("--backend", "sglang", "--dataset-name", "mooncake", "--dataset-path", str(small_trace)),
        *("--cache-report", "--flush-cache"),
    ]
    told, counted = bench("mooncake", flags)
    assert_agree(told, counted, len(small_trace.read_text().splitlines()))
    printed = (environments / "outputs/bench_serving-mooncake.txt").read_text()
    reported = re.search(r"Total cached tokens: +(\d+)", printed)
    assert reported is not None
    assert int(reported[1]) == counted.cached_tokens > 0

"""Shared against replicated: the same batch messages, every logit compared as raw bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cp_shared_kv.engine.cluster import no_progress
from cp_shared_kv.engine.replay import compare_recordings, replay_replicated
from cp_shared_kv.testing.running_cluster import Running, running, small_config

pytestmark = pytest.mark.e2e

OUTPUT_TOKENS = 4


def send(served: Running, prompts: list[str]) -> None:
    def one(text: str) -> None:
        body = {"model": "demo", "prompt": text, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        url = f"{served.url}/v1/completions"
        httpx.post(url, json=body, trust_env=False, timeout=120).raise_for_status()

    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(one, prompts))


def conversation() -> list[list[str]]:
    """Prompts in waves: shared prefixes, unaligned tails, one token, more than one rank holds."""
    base = "".join(f"line {i} of the agreement, {i * 31 % 89}; " for i in range(60))
    return [
        [base[:1300], "short", base[:100]],
        [base[:1300] + " what then?", base[:700] + " and?", "x"],
        ["other " + base[:1000], base[:1300]],
    ]


@pytest.mark.parametrize(
    ("kv_read", "split"),
    [
        ("pull", "in-seq-split"),
        ("collective", "in-seq-split"),
        ("pull", "round-robin-split"),
        ("collective", "round-robin-split"),
    ],
)
def test_sharing_changes_no_bit_of_any_logit(kv_read: str, split: str, tmp_path: Path) -> None:
    shared, replicated = tmp_path / "shared", tmp_path / "replicated"
    config = small_config(kv_read=kv_read, nsa_prefill_cp_mode=split, record_batches=shared)
    with running(config, tmp_path / "log") as served:
        for wave in conversation():
            send(served, wave)
        replay_replicated(served.cluster, shared, replicated, on_progress=no_progress)
    found = compare_recordings(shared, replicated, 2)
    assert found.difference is None
    assert found.prompt_rows > 1300
    # The first output token comes from prefill's logits, the others from a step each.
    assert found.decode_rows == sum(map(len, conversation())) * (OUTPUT_TOKENS - 1)


def test_one_flipped_byte_of_one_page_is_found_and_named(tmp_path: Path) -> None:
    shared, replicated = tmp_path / "shared", tmp_path / "replicated"
    with running(small_config(record_batches=shared), tmp_path / "log") as served:
        send(served, ["flip " * 150])
        replay_replicated(
            served.cluster,
            shared,
            replicated,
            on_progress=no_progress,
            flip_byte_before_batch=2,
        )
    difference = compare_recordings(shared, replicated, 2).difference
    assert difference is not None
    assert difference.batch == 2
    assert difference.first_bits != difference.second_bits

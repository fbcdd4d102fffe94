"""Shared against replicated: the same batch messages, every logit compared as raw bits."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
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


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint of widths that every page format takes: two blocks a latent, one a key."""
    directory = tmp_path_factory.mktemp("wide") / "model"
    make_tiny_checkpoint(directory, ModelShape(kv_lora_rank=256, index_head_dim=128), seed=1)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return directory


# Every format with both splits, and in these every read. The narrow demo model computes in fp32,
# the wide one in bf16. Scratch for 1,024 tokens is too little for the longer prompts: read in
# blocks.
@pytest.mark.parametrize(
    ("model", "kv_cache_dtype", "formats", "kv_read", "split"),
    [
        ("demo", "auto", ("fp32", "fp32"), "pull", "in-seq-split"),
        ("demo", "auto", ("fp32", "fp32"), "collective", "round-robin-split"),
        ("demo", "bf16", ("bf16", "bf16"), "collective", "in-seq-split"),
        ("demo", "bf16", ("bf16", "bf16"), "pull", "round-robin-split"),
        ("wide", "auto", ("bf16", "fp8_scaled"), "pull", "in-seq-split"),
        ("wide", "auto", ("bf16", "fp8_scaled"), "collective", "round-robin-split"),
        ("wide", "fp8_e4m3", ("fp8_ds_mla", "fp8_scaled"), "collective", "in-seq-split"),
        ("wide", "fp8_e4m3", ("fp8_ds_mla", "fp8_scaled"), "pull", "round-robin-split"),
        ("demo", "auto", ("fp32", "fp32"), "sparse", "round-robin-split"),
        pytest.param(
            *("demo", "auto", ("fp32", "fp32"), "sparse in blocks", "in-seq-split"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *("wide", "auto", ("bf16", "fp8_scaled"), "sparse in blocks", "round-robin-split"),
            marks=pytest.mark.soak,
        ),
        ("wide", "fp8_e4m3", ("fp8_ds_mla", "fp8_scaled"), "sparse in blocks", "in-seq-split"),
    ],
)
def test_sharing_changes_no_bit_of_any_logit(
    model: str,
    kv_cache_dtype: str,
    formats: tuple[str, str],
    kv_read: str,
    split: str,
    wide_model: Path,
    tmp_path: Path,
) -> None:
    shared, replicated = tmp_path / "shared", tmp_path / "replicated"
    kv_read, _, in_blocks = kv_read.partition(" ")
    config = small_config(
        kv_cache_dtype=kv_cache_dtype,
        kv_read=kv_read,
        kv_scratch_tokens=1024 if in_blocks else None,
        nsa_prefill_cp_mode=split,
        record_batches=shared,
        **({"model_path": wide_model} if model == "wide" else {}),
    )
    with running(config, tmp_path / "log") as served:
        for wave in conversation():
            send(served, wave)
        replay_replicated(served.cluster, shared, replicated, on_progress=no_progress)
        (line,) = served.log_lines("KV page formats")
    assert f"latent:{formats[0]} " in line
    assert f"index:{formats[1]} " in line
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


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kv_read", "split"), [("pull", "in-seq-split"), ("collective", "round-robin-split")]
)
def test_eight_ranks_change_no_bit_either(kv_read: str, split: str, tmp_path: Path) -> None:
    shared, replicated = tmp_path / "shared", tmp_path / "replicated"
    config = small_config(
        attention_context_parallel_size=8,
        max_total_tokens=256,
        kv_read=kv_read,
        nsa_prefill_cp_mode=split,
        record_batches=shared,
    )
    with running(config, tmp_path / "log") as served:
        assert served.get("/server_info").json()["max_total_num_tokens"] == 8 * 256
        for wave in conversation():
            send(served, wave)
        replay_replicated(served.cluster, shared, replicated, on_progress=no_progress)
    found = compare_recordings(shared, replicated, 8)
    assert found.difference is None
    assert found.decode_rows == sum(map(len, conversation())) * (OUTPUT_TOKENS - 1)

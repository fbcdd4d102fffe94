"""The whole engine on two GPUs: no bit changes by sharing, and the answers are those of the CPU.

With one GPU the ranks share it, which shows the same but for anything of links.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_shared_kv.demo_model.shapes import ModelShape
from cp_shared_kv.demo_model.tiny_checkpoints import make_tiny_checkpoint
from cp_shared_kv.engine.cluster import Cluster, no_progress
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.replay import compare_recordings, replay_replicated
from cp_shared_kv.errors import CapacityError, ConfigError
from cp_shared_kv.kernels.needs import missing_for_gpus
from cp_shared_kv.model.config import ModelConfig
from cp_shared_kv.model.ops.hopper import lacking_for
from cp_shared_kv.testing.rank_process import load
from cp_shared_kv.testing.running_cluster import Running, running, small_config

pytestmark = pytest.mark.gpu

CPU_TESTS = Path(__file__).parents[1] / "e2e/test_bit_equality.py"
OUTPUT_TOKENS = 4
PROMPTS = ["short", "line of the agreement; " * 40, "line of the agreement; " * 40 + "and then?"]


@pytest.fixture(scope="module", autouse=True)
def _a_gpu() -> None:
    if missing := missing_for_gpus(1):
        pytest.skip(missing)


def gpu_config(**settings: Any) -> EngineConfig:
    return small_config(device="cuda", ranks_share_gpus=torch.cuda.device_count() < 2, **settings)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint of widths that every page format takes, also row by row."""
    shape = ModelShape(kv_lora_rank=512, index_head_dim=128)
    return bf16_checkpoint(tmp_path_factory.mktemp("wide") / "model", shape)


@pytest.fixture(scope="module")
def hopper_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 checkpoint of widths that DeepGEMM and FlashMLA take."""
    shape = ModelShape(kv_lora_rank=512, qk_rope_head_dim=64, index_n_heads=32, index_head_dim=128)
    return bf16_checkpoint(tmp_path_factory.mktemp("hopper") / "model", shape)


def bf16_checkpoint(directory: Path, shape: ModelShape) -> Path:
    make_tiny_checkpoint(directory, shape, seed=1)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return directory


# Scratch for 1,024 tokens is too little for the longer prompts: their index K comes in several
# blocks, and the rows of 16 tokens at a time.
@pytest.mark.parametrize(
    ("model", "kv_cache_dtype", "formats", "kv_read", "split"),
    [
        ("demo", "auto", ("fp32", "fp32"), "auto", "in-seq-split"),
        ("demo", "auto", ("fp32", "fp32"), "push", "round-robin-split"),
        ("demo", "bf16", ("bf16", "bf16"), "collective", "in-seq-split"),
        ("wide", "auto", ("bf16", "fp8_scaled"), "pull", "round-robin-split"),
        ("wide", "fp8_e4m3", ("fp8_ds_mla", "fp8_scaled"), "auto", "round-robin-split"),
        ("wide", "fp8_e4m3", ("fp8_ds_mla", "fp8_scaled"), "push", "in-seq-split"),
        ("hopper", "auto", ("bf16", "fp8_scaled"), "pull", "in-seq-split"),
        ("hopper", "fp8_e4m3", ("fp8_ds_mla", "fp8_scaled"), "auto", "round-robin-split"),
        ("demo", "auto", ("fp32", "fp32"), "sparse in blocks", "in-seq-split"),
        ("demo", "bf16", ("bf16", "bf16"), "sparse in blocks", "round-robin-split"),
        ("wide", "auto", ("bf16", "fp8_scaled"), "sparse", "in-seq-split"),
        ("wide", "auto", ("bf16", "fp8_scaled"), "sparse in blocks", "round-robin-split"),
        ("wide", "fp8_e4m3", ("fp8_ds_mla", "fp8_scaled"), "sparse", "round-robin-split"),
        ("wide", "fp8_e4m3", ("fp8_ds_mla", "fp8_scaled"), "sparse in blocks", "in-seq-split"),
        ("demo", "auto", ("fp32", "fp32"), "auto in blocks", "round-robin-split"),
        ("wide", "auto", ("bf16", "fp8_scaled"), "auto in blocks", "in-seq-split"),
        ("wide", "fp8_e4m3", ("fp8_ds_mla", "fp8_scaled"), "auto in blocks", "round-robin-split"),
    ],
)
def test_sharing_changes_no_bit_of_any_logit(
    model: str,
    kv_cache_dtype: str,
    formats: tuple[str, str],
    kv_read: str,
    split: str,
    wide_model: Path,
    hopper_model: Path,
    tmp_path: Path,
) -> None:
    paths = {"wide": wide_model, "hopper": hopper_model}
    if model == "hopper" and (lacking := lacking_for(ModelConfig.from_directory(hopper_model))):
        pytest.skip("; ".join(lacking))
    shared, replicated = tmp_path / "shared", tmp_path / "replicated"
    kv_read, _, in_blocks = kv_read.partition(" ")
    config = gpu_config(
        kv_cache_dtype=kv_cache_dtype,
        kv_read=kv_read,
        kv_scratch_tokens=1024 if in_blocks else None,
        nsa_prefill_cp_mode=split,
        record_batches=shared,
        attention_ops="hopper" if model == "hopper" else "auto",
        log_level="debug" if kv_read == "auto" else "info",
        **({"model_path": paths[model]} if model in paths else {}),
    )
    waves = load(f"{CPU_TESTS}:conversation")()
    with running(config, tmp_path / "log") as served:
        for wave in waves:
            load(f"{CPU_TESTS}:send")(served, wave)
        replay_replicated(served.cluster, shared, replicated, on_progress=no_progress)
        (line,) = served.log_lines("KV page formats")
        chosen = {line.split(": ")[1].split()[0] for line in served.log_lines("reads of ")}
    if kv_read == "auto":  # so short prefixes are read whole, but for those that do not fit
        assert chosen == ({"whole", "sparse"} if in_blocks else {"whole"})
    assert f"latent:{formats[0]} " in line
    assert f"index:{formats[1]} " in line
    found = compare_recordings(shared, replicated, 2)
    assert found.difference is None
    assert found.prompt_rows > 1300
    assert found.decode_rows == sum(map(len, waves)) * (OUTPUT_TOKENS - 1)


def test_a_flipped_byte_is_found_on_gpus_too(tmp_path: Path) -> None:
    shared, replicated = tmp_path / "shared", tmp_path / "replicated"
    with running(gpu_config(record_batches=shared), tmp_path / "log") as served:
        load(f"{CPU_TESTS}:send")(served, ["flip " * 150])
        replay_replicated(
            served.cluster, shared, replicated, on_progress=no_progress, flip_byte_before_batch=2
        )
    difference = compare_recordings(shared, replicated, 2).difference
    assert difference is not None
    assert difference.batch == 2


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A cluster that also compares the checksums of all pages that decode receives."""
    log_file = tmp_path_factory.mktemp("cluster") / "cluster.log"
    with running(gpu_config(verify_kv_transfer=True), log_file) as served:
        yield served


def answer(served: Running, prompt: str) -> dict[str, Any]:
    """Greedy tokens and their log-probabilities."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "logprobs": 3}
    reply = served.post(body | {"temperature": 0})
    reply.raise_for_status()
    return reply.json()["choices"][0]


def test_answers_are_those_of_the_cpu(on_gpus: Running, tmp_path: Path) -> None:
    with running(small_config(), tmp_path / "log") as on_cpu:
        expected = [answer(on_cpu, prompt) for prompt in PROMPTS]
    for prompt, wanted in zip(PROMPTS, expected, strict=True):
        got = answer(on_gpus, prompt)
        assert got["text"] == wanted["text"]
        for mine, theirs in zip(
            got["logprobs"]["token_logprobs"], wanted["logprobs"]["token_logprobs"], strict=True
        ):
            assert mine == pytest.approx(theirs, abs=1e-4)


def test_the_log_says_who_computes_where(on_gpus: Running) -> None:
    lines = on_gpus.log_lines("computes on cuda:")
    assert len(lines) == 3
    seen = {line.split(",")[0] for line in lines}
    assert seen == {f"computes on cuda:{i}" for i in range(min(2, torch.cuda.device_count()))}


def test_a_group_whose_rank_died_comes_back(on_gpus: Running) -> None:
    before = answer(on_gpus, PROMPTS[1])
    os.kill(on_gpus.cluster.pid("prefill-0/rank-1"), signal.SIGKILL)
    on_gpus.await_lost("prefill-0", 1)
    on_gpus.await_ready("prefill-0", 2)
    assert answer(on_gpus, PROMPTS[1])["text"] == before["text"]


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"GPU of its own.*64.*CUDA_VISIBLE_DEVICES"):
        Cluster(small_config(device="cuda", attention_context_parallel_size=64))


def test_pools_that_no_gpu_holds_are_refused() -> None:
    with pytest.raises(CapacityError, match="too little memory on a GPU"):
        Cluster(gpu_config(max_total_tokens=1 << 40))


def test_pools_are_sized_from_the_memory_of_the_gpus() -> None:
    config = gpu_config(max_total_tokens=None, decode_max_total_tokens=None)
    limits = Cluster(config).limits
    # The demo's context is short: four of them a rank is where it ends.
    assert limits.physical_tokens_per_rank == 4 * limits.context_length + limits.page_size

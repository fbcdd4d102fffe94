"""What runs on which GPU, what they have room for, and what is refused; without a GPU."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cp_shared_kv.engine import gpus
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.gpu_memory import WORKING_BYTES, check_gpu_memory, gpu_places
from cp_shared_kv.engine.gpus import GPU, check_gpus, look_at_gpus
from cp_shared_kv.engine.model_spec import describe_model
from cp_shared_kv.engine.placement import gpu_index, occupants
from cp_shared_kv.engine.sizing import MemoryPlace, resolve_limits
from cp_shared_kv.errors import CapacityError, ConfigError, StartupError
from cp_shared_kv.memory.formats.registry import latent_format
from cp_shared_kv.model.tensor_shapes import tensor_shapes
from cp_shared_kv.testing.running_cluster import small_config

GIB = 1 << 30


def config(**changes: Any) -> EngineConfig:
    return small_config(**({"device": "cuda"} | changes))


def some_gpus(count: int, free_bytes: int = 100 * GIB) -> list[GPU]:
    return [GPU("NVIDIA H200", (9, 0), free_bytes, 140 * GIB)] * count


def test_what_cannot_go_with_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"push.*--device cpu.*add --device cuda"):
        config(device="cpu", kv_read="push")


@pytest.mark.parametrize(
    ("device", "kv_read", "reader", "transport"),
    [
        ("cpu", "auto", "pull", "shared_memory"),
        ("cuda", "auto", "cheapest", "cuda_ipc"),
        ("cuda", "push", "push", "cuda_ipc"),
        ("cuda", "sparse", "sparse", "cuda_ipc"),
        ("cuda", "collective", "collective", "cuda_ipc"),
    ],
)
def test_what_auto_means_follows_the_device(
    device: Any, kv_read: str, reader: str, transport: str
) -> None:
    chosen = config(device=device, kv_read=kv_read)
    assert (chosen.resolved_kv_read, chosen.transport) == (reader, transport)
    other = config(device=device, kv_read=kv_read, disaggregation_transfer_backend="mooncake")
    assert other.transport == "mooncake"


def test_ranks_come_first_and_decode_workers_after_them() -> None:
    two_groups = config(prefill_groups=2, decode_workers=3)
    ranks = [gpu_index(two_groups, 8, group, rank) for group in (0, 1) for rank in (0, 1)]
    assert ranks == [0, 1, 2, 3]
    assert [gpu_index(two_groups, 8, worker, None) for worker in range(3)] == [4, 5, 6]
    assert occupants(two_groups, 8) == [(1, 0)] * 4 + [(0, 1)] * 3 + [(0, 0)]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_where_gpus_are_few_only_ranks_of_one_group_never_share(count: int) -> None:
    crowded = config(prefill_groups=3, decode_workers=2)
    for group in range(3):
        assert len({gpu_index(crowded, count, group, rank) for rank in (0, 1)}) == 2
    places = occupants(crowded, count)
    assert sum(ranks for ranks, _ in places) == 6
    assert sum(workers for _, workers in places) == 2


def test_rows_that_no_kernel_fetches_are_refused_before_the_start() -> None:
    spec = dataclasses.replace(
        describe_model(config()).pool_spec,
        latent=latent_format("fp8_ds_mla", kv_lora_rank=256, qk_rope_head_dim=64, page_size=64),
    )
    check_gpus(config(kv_read="pull"), spec, some_gpus(2))
    check_gpus(config(kv_read="auto"), spec, some_gpus(2))
    for needs_rows in ({"kv_read": "sparse"}, {"kv_read": "auto", "kv_scratch_tokens": 1024}):
        with pytest.raises(ConfigError, match=r"one by one.*multiple of 16 bytes.*whole pages"):
            check_gpus(config(**needs_rows), spec, some_gpus(2))


def test_gpus_that_do_not_suit_are_refused_with_what_to_do() -> None:
    spec = describe_model(config()).pool_spec
    check_gpus(config(), spec, some_gpus(2))
    with pytest.raises(ConfigError, match=r"GPU of its own.*sees 1 GPU;.*CUDA_VISIBLE_DEVICES"):
        check_gpus(config(), spec, some_gpus(1))
    check_gpus(config(ranks_share_gpus=True), spec, some_gpus(1))
    old = [*some_gpus(1), GPU("Tesla V100", (7, 0), GIB, GIB)]
    with pytest.raises(ConfigError, match=r"Tesla V100, compute capability 7.0.*8.0 or more"):
        check_gpus(config(), spec, old)


def test_pages_that_are_not_whole_words_of_the_kernels_are_refused() -> None:
    tiny = config(page_size=1, kv_cache_dtype="bf16")
    spec = describe_model(tiny).pool_spec
    odd = dataclasses.replace(spec, index=dataclasses.replace(spec.index, sections=(66,)))
    with pytest.raises(ConfigError, match=r"66, with --page-size 1.*multiples of 16"):
        check_gpus(tiny, odd, some_gpus(2))


def test_weights_are_charged_before_pools_are_sized() -> None:
    shared = config(max_total_tokens=None, decode_max_total_tokens=None)
    model = describe_model(shared)
    weights = 4 * sum(torch.Size(shape).numel() for shape in tensor_shapes(model.config).values())
    places = gpu_places(shared, model, some_gpus(3))
    left = 100 * GIB - weights - WORKING_BYTES
    assert places == [MemoryPlace(left, 1, 0), MemoryPlace(left, 1, 0), MemoryPlace(left, 0, 1)]
    beside_a_rank = gpu_places(shared, model, some_gpus(2))
    assert beside_a_rank[0] == MemoryPlace(left - weights - WORKING_BYTES, 1, 1)
    with pytest.raises(CapacityError, match=r"GPU 0 .*1 ranks and 1 decode workers"):
        gpu_places(shared, model, some_gpus(2, 2 * WORKING_BYTES))


@pytest.mark.parametrize("gpu_count", [2, 3])
@pytest.mark.parametrize("decode_tokens", [None, 4096])
def test_pools_fill_the_fullest_gpu_and_no_more(gpu_count: int, decode_tokens: int | None) -> None:
    shared = config(max_total_tokens=None, decode_max_total_tokens=decode_tokens)
    model = describe_model(shared)
    processes = 2 if gpu_count == 2 else 1  # on the fullest GPU
    free_bytes = processes * WORKING_BYTES + (40 << 20)
    places = gpu_places(shared, model, some_gpus(gpu_count, free_bytes))
    limits = resolve_limits(shared, model.pool_spec, model.context_length, gpus=places)
    check_gpu_memory(limits, places)
    assert limits.physical_tokens_per_rank < 4 * limits.context_length  # memory was the limit
    more = dataclasses.replace(shared, max_total_tokens=limits.physical_tokens_per_rank * 3 // 2)
    larger = resolve_limits(more, model.pool_spec, model.context_length, gpus=places)
    with pytest.raises(CapacityError, match="too little memory on a GPU"):
        check_gpu_memory(larger, places)


def test_a_cpu_build_is_replaced_by_the_command_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    needed = re.search(
        r'"(torch>=.*?)"', (Path(__file__).parents[2] / "pyproject.toml").read_text()
    )
    assert needed is not None
    assert f"pip install --force-reinstall '{needed[1]}' --index-url" in (gpus._look().change or "")


def test_no_gpu_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(StartupError, match=r"--device cuda: (torch .* for CPUs|no NVIDIA GPU)"):
        look_at_gpus()
    monkeypatch.setattr(gpus.sys, "executable", "/bin/false")
    with pytest.raises(StartupError, match="cannot look at the GPUs"):
        look_at_gpus()

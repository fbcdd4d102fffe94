"""`cpkv plan`: what fits on a group of GPUs, before there is one."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from cp_shared_kv.cli.whole_numbers import WholeNumbers
from cp_shared_kv.engine.config_values import KVCacheDtype
from cp_shared_kv.errors import ConfigError
from cp_shared_kv.planner.capacity import PlanRequest, make_plan
from cp_shared_kv.planner.gpus import GIB, gpu_named
from cp_shared_kv.planner.model_catalogue import model_named
from cp_shared_kv.planner.plan_table import notes, print_plan
from cp_shared_kv.planner.provenance import provenance
from cp_shared_kv.planner.ranges import check_above_zero, check_at_least
from cp_shared_kv.planner.weight_bytes import (
    WeightDtype,
    WeightSplit,
    check_expert_ranks,
    weight_bytes,
)

DEFAULT_LENGTHS = (8_192, 32_768, 131_072, 524_288)
MOST_GIB = 2**20
"""A pebibyte: what a rank is said to have must be countable in bytes."""


def plan(
    model: str,
    /,
    *,
    gpu: str | None = None,
    gpu_memory_gib: float | None = None,
    kv_budget_gib: float | None = None,
    attention_context_parallel_size: Annotated[
        int, Parameter(name=["--attention-context-parallel-size", "--cp-size"])
    ] = 8,
    kv_cache_dtype: KVCacheDtype = "bf16",
    page_size: int = 64,
    context_length: int | None = None,
    chunked_prefill_size: int = 8192,
    mem_fraction_static: float = 0.9,
    weight_dtype: WeightDtype = "auto",
    expert_parallel_size: int | None = None,
    attention_tensor_parallel_size: int = 1,
    lengths: WholeNumbers = DEFAULT_LENGTHS,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Say what fits: weights, scratch, KV tokens, longest prompt, prompts at once.

    Three ways to hold the KV cache of a context-parallel group stand side by side: replicated
    (every rank stores everything), layer split (each rank some layers) and shared (each page has
    one owner). Sizes come from the code that sizes the engine's own pools; nothing is started, no
    weights are read. A rank is one GPU.

    ```
    cpkv plan glm-5.2 --gpu h200
    cpkv plan deepseek-v3.2 --gpu h20-3e --kv-cache-dtype fp8_e4m3 --lengths 16384,131072
    cpkv plan /models/GLM-5/config.json --kv-budget-gib 22.145 --cp-size 8 --json
    ```

    Parameters
    ----------
    model
        deepseek-v3.2, glm-5 or glm-5.2; or a config.json, or the directory that has it.
    gpu
        Kind of GPU: h20 (the H20 of 96 GB), h20-3e (that of 141 GB), h100, h200, h800 or b200.
    gpu_memory_gib
        Memory of a GPU that is not in the list, in GiB, as its driver shows it.
    kv_budget_gib
        What weights and scratch leave for the KV pool of a rank, in GiB, instead of working it out.
    attention_context_parallel_size
        Ranks of the prefill group, N.
    kv_cache_dtype
        What KV pages store, as for `cpkv serve`: fp32, bf16, or fp8_e4m3.
    page_size
        Tokens of a KV page.
    context_length
        Longest prompt plus output in tokens; the model's own limit by default.
    chunked_prefill_size
        New tokens of one prefill batch: scratch and activations grow with it.
    mem_fraction_static
        Part of a GPU's memory for weights, KV pool and scratch; the rest is for activations.
    weight_dtype
        fp8 (in blocks) or bf16; auto is what the config.json says.
    expert_parallel_size
        Ranks over which routed experts are spread, a divisor of their number; all N by default.
    attention_tensor_parallel_size
        Ranks over which all other weights are spread, within a context-parallel rank.
    lengths
        Prompt lengths, with commas between, for which to count how many fit at once.
    as_json
        Write the plan as JSON to stdout, all in bytes and tokens.
    """
    check_at_least("--attention-context-parallel-size", attention_context_parallel_size, 1)
    config = model_named(model)
    if gpu is not None and gpu_memory_gib is not None:
        raise ConfigError(
            "two memory sizes were given",
            value=f"--gpu {gpu} --gpu-memory-gib {gpu_memory_gib:g}",
            change="drop one of the two",
        )
    memory = _bytes("--gpu-memory-gib", gpu_memory_gib)
    if gpu is not None:
        memory = gpu_named(gpu).memory_bytes
    if expert_parallel_size is None:
        expert_parallel_size = attention_context_parallel_size
    else:
        check_expert_ranks(expert_parallel_size, config.n_routed_experts)
    request = PlanRequest(
        model=config,
        weights=weight_bytes(config, weight_dtype),
        split=WeightSplit(expert_parallel_size, attention_tensor_parallel_size),
        cp_size=attention_context_parallel_size,
        memory_bytes=memory,
        memory_fraction=mem_fraction_static,
        kv_budget_bytes=_bytes("--kv-budget-gib", kv_budget_gib),
        kv_cache_dtype=kv_cache_dtype,
        page_size=page_size,
        context_length=context_length,
        chunk_tokens=chunked_prefill_size,
        prompt_lengths=tuple(lengths),
    )
    made = make_plan(request)
    if as_json:
        content = {
            "model": model,
            "gpu": gpu,
            "settings": request.as_plain(),
            **asdict(made),
            "notes": notes(made),
            **provenance(),
        }
        print(json.dumps(content, indent=1))
        return 0
    what = gpu or _given(gpu_memory_gib, kv_budget_gib)
    title = f"{model}, {made.cp_size} ranks, {what}, {kv_cache_dtype} pages of {page_size} tokens"
    print_plan(made, title, Console(highlight=False))
    return 0


def _bytes(flag: str, gib: float | None) -> int | None:
    check_above_zero(flag, gib, MOST_GIB)
    return None if gib is None else int(gib * GIB)


def _given(memory_gib: float | None, kv_budget_gib: float | None) -> str:
    if memory_gib is not None:
        return f"{memory_gib:g} GiB a rank"
    return f"{kv_budget_gib:g} GiB for KV a rank"

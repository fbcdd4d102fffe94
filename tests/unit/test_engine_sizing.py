"""Sizes: what a config gives on a machine, what is refused, and that no budget is overrun."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_shared_kv.engine import sizing
from cp_shared_kv.engine.budget import reads_ahead
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.sizing import MEMORY_SHARE, check_shared_memory, resolve_limits
from cp_shared_kv.errors import CapacityError, ConfigError
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.reads.forward_kv import ForwardKV, SparseReads
from cp_shared_kv.reads.full_view import FullViewReader
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan
from cp_shared_kv.reads.prefix_reader import LocalReader, PrefixReader
from cp_shared_kv.reads.pull import PullReader
from cp_shared_kv.reads.pull_rows import PullRowsReader
from cp_shared_kv.reads.read_ahead import ReadAhead
from cp_shared_kv.reads.scratch import Scratch
from cp_shared_kv.testing.lanes import EagerLane

Group = Literal["one rank", "replicated", "pull", "collective", "sparse", "auto on GPUs"]
MODEL_CONTEXT = 4096
MIB = 2**20


def pool_spec(
    page_size: int = 64, layers: int = 3, index_layers: tuple[int, ...] = (0, 2)
) -> KVPoolSpec:
    return KVPoolSpec(
        latent=latent_format("fp32", kv_lora_rank=8, qk_rope_head_dim=4, page_size=page_size),
        index=index_format("fp32", index_head_dim=4, page_size=page_size),
        num_layers=layers,
        index_layers=index_layers,
    )


def config(group: Group = "pull", cp_size: int = 4, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {"model_path": Path("/models/tiny")}
    if group != "one rank":
        values |= {
            "attention_context_parallel_size": cp_size,
            "enable_nsa_prefill_context_parallel": True,
        }
    if group in ("pull", "collective", "sparse"):
        values |= {"enable_nsa_prefill_cp_shared_kv": True, "kv_read": group}
    if group == "auto on GPUs":
        values |= {"enable_nsa_prefill_cp_shared_kv": True, "device": "cuda"}
    return EngineConfig(**(values | changes))


def limits_of(
    engine_config: EngineConfig,
    spec: KVPoolSpec | None = None,
    context: int = MODEL_CONTEXT,
    free_bytes: int = 0,
) -> EngineLimits:
    spec = spec or pool_spec(engine_config.page_size)
    return resolve_limits(engine_config, spec, context, free_bytes=free_bytes)


# Given sizes -------------------------------------------------------------------------------------


def test_a_shared_group_holds_n_times_what_a_rank_holds() -> None:
    limits = limits_of(config(max_total_tokens=700))
    assert limits.physical_tokens_per_rank == 640  # whole pages
    assert limits.logical_tokens == limits.decode_tokens == 4 * 640
    assert limits.pool_bytes_per_rank == 11 * pool_spec().bytes_per_page
    assert limits.decode_pool_bytes == 41 * pool_spec().bytes_per_page
    assert limits.longest_prompt_tokens == 2559  # decode adds one token to it
    assert limits.context_length == MODEL_CONTEXT


def test_a_replicated_group_holds_what_one_rank_holds() -> None:
    limits = limits_of(config("replicated", max_total_tokens=640))
    assert limits.logical_tokens == limits.physical_tokens_per_rank == 640
    assert limits.longest_prompt_tokens == 639


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({"decode_max_total_tokens": 8192}, 2560),  # the prefill group's pool is the least
        ({"decode_max_total_tokens": 1100}, 1087),  # 17 whole pages at decode
        ({"context_length": 500, "decode_max_total_tokens": 8192}, 499),
    ],
)
def test_the_longest_prompt_is_set_by_the_least_limit(
    changes: dict[str, int], longest: int
) -> None:
    assert limits_of(config(max_total_tokens=640, **changes)).longest_prompt_tokens == longest


def test_the_pool_of_one_rank_refuses_what_the_group_takes() -> None:
    limits = limits_of(config(max_total_tokens=640))
    prompt_pages = 2560 // 64
    with pytest.raises(CapacityError, match=r"40 pages.*at most 10 pages"):
        limits.one_rank_pool().admit(1, np.empty(0, np.int64), prompt_pages)
    assert limits.capacity == KVCapacity(10, 64, 4)


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        limits_of(config(max_total_tokens=640, context_length=MODEL_CONTEXT + 1))
    message = str(refused.value)
    assert "--context-length" in message
    assert ": 4097;" in message
    assert "at most 4096 (max_position_embeddings)" in message


def test_a_longer_context_than_a_message_can_carry_is_not_promised() -> None:
    limits = limits_of(config(max_total_tokens=640), context=2**24)
    assert limits.context_length == 2**20


def test_no_room_for_a_prompt_and_an_output_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no prompt would fit: .*decode_tokens=1,.*one output"):
        limits_of(config(page_size=1, max_total_tokens=8, decode_max_total_tokens=1))


# Scratch -----------------------------------------------------------------------------------------


class OneOfManyRanks:
    """A group whose other ranks need no answer: planning a batch only ever waits for them."""

    def __init__(self, cp_rank: int, cp_size: int) -> None:
        self.cp_rank, self.cp_size = cp_rank, cp_size

    def all_gather_bytes(self, local: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("planning exchanges no bytes")

    def barrier(self) -> None:
        pass


def take_scratch(
    engine_config: EngineConfig, limits: EngineLimits, batches: list[list[BatchSpan]]
) -> Scratch:
    """The scratch of rank 0 after it has planned the batches; CapacityError past the limit."""
    spec = pool_spec(limits.page_size)
    group = OneOfManyRanks(0, limits.cp_size)
    pages = limits.capacity.physical_pages
    sharers = limits.cp_size if limits.shared else 1
    layout = CpSharedKVLayout(limits.page_size, sharers, 0, physical_pages=pages)
    pool = KVPool(spec, pages, PrivateBuffer(spec.pool_bytes(pages)))
    scratch = Scratch(limits.scratch_limit_bytes)
    readers: dict[str, PrefixReader] = {
        "collective": FullViewReader(group, pool, scratch),
        "pull": PullReader(group, [pool] * limits.cp_size),
        "sparse": PullReader(group, [pool] * limits.cp_size),
        "cheapest": PullReader(group, [pool] * limits.cp_size),
        "local": LocalReader(),
    }
    sparse, ahead = None, None
    if reads_ahead(engine_config):
        assert limits.kv_scratch_tokens is not None
        ahead = ReadAhead(EagerLane(), limits.kv_scratch_tokens // limits.page_size)
    if engine_config.resolved_kv_read in ("sparse", "cheapest"):
        rows, most_tokens = (
            PullRowsReader([pool] * limits.cp_size, scratch),
            limits.kv_scratch_tokens,
        )
        sparse = SparseReads(rows, most_tokens)
        if engine_config.resolved_kv_read == "cheapest":
            assert most_tokens is not None
            turns = count()  # any choice that a batch leaves

            def chosen(plan: ReadPlan, _new_tokens: int) -> bool:
                return len(plan.logical_pages) > most_tokens // 64 or next(turns) % 2 == 1

            sparse = SparseReads(rows, most_tokens, chosen)
    for spans in batches:
        ForwardKV.build(
            pool,
            layout,
            group,
            readers[engine_config.resolved_kv_read],
            spans,
            engine_config.nsa_prefill_cp_mode,
            scratch=scratch,
            sparse=sparse,
            ahead=ahead,
        )
    return scratch


def span(first_page: int, prefix_tokens: int, new_tokens: int, page_size: int = 64) -> BatchSpan:
    pages = -(-(prefix_tokens + new_tokens) // page_size)
    logical_pages = np.arange(first_page, first_page + pages, dtype=np.int64)
    return BatchSpan(LogicalPages(logical_pages), prefix_tokens, new_tokens)


@pytest.mark.parametrize(
    ("group", "device"),
    [
        *((group, "cpu") for group in ("replicated", "pull", "collective", "sparse")),
        *((group, "cuda") for group in ("auto on GPUs", "pull", "collective", "sparse")),
    ],
)
@pytest.mark.parametrize("split", ["in-seq-split", "round-robin-split"])
def test_the_scratch_limit_holds_the_longest_prefix_and_any_chunk(
    group: Group, device: str, split: str
) -> None:
    chosen = config(
        group,
        device=device,
        max_total_tokens=1024 if group != "replicated" else 4096,
        chunked_prefill_size=300,
        nsa_prefill_cp_mode=split,
    )
    limits = limits_of(chosen)
    one_token_each = [span(1 + i, 0, 1) for i in range(60)]
    whole_chunk = [span(1, 0, 300)]
    longest_prefix = [span(1, 4095 - 300, 300)]
    batches = [one_token_each, whole_chunk, longest_prefix]
    scratch = take_scratch(chosen, limits, batches + batches)
    assert 0 < scratch.bytes_in_use <= limits.scratch_limit_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("group", ["pull", "collective"])
def test_as_many_prefix_pages_as_the_limit_says_fit_scratch(group: Group, device: str) -> None:
    chosen = config(
        group, device=device, max_total_tokens=6400, chunked_prefill_size=64, context_length=640
    )
    limits = limits_of(chosen)
    assert limits.max_prefix_pages == 20  # of 400: two of the longest prefixes
    long_prefixes = [span(1 + 10 * i, 639, 1) for i in range(40)]
    take_scratch(chosen, limits, [[span(1, 0, 64)], long_prefixes[:2]])
    take_scratch(chosen, limits, [long_prefixes[:1], long_prefixes[:2], long_prefixes[:1]])
    with pytest.raises(CapacityError, match="scratch for"):
        take_scratch(chosen, limits, [long_prefixes])  # so nobody may build such a batch


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kv_scratch_tokens", [None, 1024, 1100])
def test_sparse_reads_take_any_batch_within_their_limit(
    kv_scratch_tokens: int | None, device: str
) -> None:
    chosen = config(
        "sparse",
        device=device,
        max_total_tokens=25600,
        chunked_prefill_size=64,
        kv_scratch_tokens=kv_scratch_tokens,
    )
    limits = limits_of(chosen)
    assert limits.kv_scratch_tokens == {None: 4096, 1024: 1024, 1100: 1088}[kv_scratch_tokens]
    assert limits.max_prefix_pages == limits.capacity.logical_pages
    long_prefixes = [span(1 + 64 * i, 4032 + 63, 1) for i in range(20)]
    fitting = [span(1, limits.kv_scratch_tokens - 64, 64)]
    scratch = take_scratch(chosen, limits, [[span(1, 0, 64)], fitting, long_prefixes, fitting])
    assert 0 < scratch.bytes_in_use <= limits.scratch_limit_bytes


@pytest.mark.parametrize("kv_scratch_tokens", [None, 1024])
def test_auto_on_gpus_has_scratch_for_whole_prefixes_and_for_rows(
    kv_scratch_tokens: int | None,
) -> None:
    chosen = config(
        "auto on GPUs",
        max_total_tokens=25600,
        chunked_prefill_size=64,
        kv_scratch_tokens=kv_scratch_tokens,
    )
    limits = limits_of(chosen)
    at_once = 4096 if kv_scratch_tokens is None else 1024
    assert limits.kv_scratch_tokens == at_once
    # Without the flag it may have to go by collective, which reads whole prefixes.
    pages = 2 * 4096 // 64 if kv_scratch_tokens is None else limits.capacity.logical_pages
    assert limits.max_prefix_pages == pages
    whole = [span(1, at_once - 64, 64)]
    long_prefixes = [span(1 + 64 * i, 4032 + 63, 1) for i in range(min(20, pages // 64))]
    for batches in ([whole, whole, long_prefixes], [long_prefixes, whole, whole]):
        scratch = take_scratch(chosen, limits, batches)
        assert 0 < scratch.bytes_in_use <= limits.scratch_limit_bytes


def test_what_scratch_does_not_take_the_pool_has() -> None:
    free_bytes, context = 64 * MIB, 1 << 20
    whole = limits_of(config("pull"), context=context, free_bytes=free_bytes)
    sparse = limits_of(config("sparse"), context=context, free_bytes=free_bytes)
    blocks = limits_of(
        config("sparse", kv_scratch_tokens=1024), context=context, free_bytes=free_bytes
    )
    assert whole.logical_tokens < sparse.logical_tokens < blocks.logical_tokens
    for limits in (whole, sparse, blocks):
        used = 4 * (limits.pool_bytes_per_rank + limits.scratch_limit_bytes)
        used += limits.decode_pool_bytes
        assert used <= free_bytes * MEMORY_SHARE
        assert used > 0.95 * free_bytes * MEMORY_SHARE


def test_a_group_that_reads_in_place_may_read_its_whole_pool() -> None:
    assert limits_of(config("replicated", max_total_tokens=6400)).max_prefix_pages == 100
    alone = limits_of(config("one rank", max_total_tokens=6400))
    assert alone.max_prefix_pages == 100
    assert alone.scratch_limit_bytes == 0


# Sizes from a budget -----------------------------------------------------------------------------


def all_bytes(limits: EngineLimits) -> int:
    ranks = limits.cp_size * (limits.pool_bytes_per_rank + limits.scratch_limit_bytes)
    return ranks + limits.decode_pool_bytes


@settings(max_examples=150, deadline=None)
@given(
    free_bytes=st.integers(0, 64 * MIB),
    group=st.sampled_from(["one rank", "replicated", "pull", "collective"]),
    cp_size=st.integers(2, 8),
    page_size=st.sampled_from([1, 16, 64]),
    context=st.integers(2, 40_000),
    chunk=st.integers(1, 4096),
    decode_tokens=st.none() | st.integers(64, 50_000),
    layers=st.integers(1, 6),
    indexed=st.booleans(),
)
def test_pools_and_scratch_together_stay_within_the_budget(
    free_bytes: int,
    group: Group,
    cp_size: int,
    page_size: int,
    context: int,
    chunk: int,
    decode_tokens: int | None,
    layers: int,
    indexed: bool,
) -> None:
    chosen = config(
        group,
        cp_size,
        page_size=page_size,
        chunked_prefill_size=chunk,
        decode_max_total_tokens=decode_tokens,
    )
    spec = pool_spec(page_size, layers, (0,) if indexed else ())
    try:
        limits = limits_of(chosen, spec, context, free_bytes)
    except (CapacityError, ConfigError):
        return
    assert all_bytes(limits) <= free_bytes * MEMORY_SHARE
    assert limits.longest_prompt_tokens >= 1


@pytest.mark.parametrize("group", ["one rank", "replicated", "pull", "collective"])
@pytest.mark.parametrize("decode_tokens", [None, 2048])
@pytest.mark.parametrize("context", [2000, 200_000])
def test_a_budget_is_used_and_not_left_over(
    group: Group, decode_tokens: int | None, context: int
) -> None:
    chosen = config(group, chunked_prefill_size=256, decode_max_total_tokens=decode_tokens)
    limits = limits_of(chosen, context=context, free_bytes=16 * MIB)
    enough = limits.physical_tokens_per_rank > 4 * context  # then more would serve nobody
    assert enough or all_bytes(limits) > 0.8 * 16 * MIB * MEMORY_SHARE


def test_more_memory_never_gives_a_smaller_pool() -> None:
    sizes: list[int] = []
    for free_bytes in range(MIB, 16 * MIB, MIB // 16):
        try:
            limits = limits_of(config(chunked_prefill_size=64), free_bytes=free_bytes)
        except CapacityError:
            assert not sizes  # what fitted once still fits with more
            continue
        sizes.append(limits.logical_tokens)
    assert sizes == sorted(sizes)
    assert sizes[0] < MODEL_CONTEXT < sizes[-1]


def test_a_small_model_does_not_take_all_memory() -> None:
    limits = limits_of(config(), context=1000, free_bytes=2**36)
    assert limits.physical_tokens_per_rank == 4032  # four contexts, and the tail of a page


@pytest.mark.parametrize("decode_tokens", [None, 4096])
def test_too_little_memory_for_a_page_is_refused(decode_tokens: int | None) -> None:
    with pytest.raises(CapacityError, match="KV budget of a rank"):
        limits_of(config(decode_max_total_tokens=decode_tokens), free_bytes=20_000)


def test_a_decode_pool_that_leaves_the_ranks_nothing_is_refused_by_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"--decode-max-total-tokens leaves .*: 1000000000, of"):
        limits_of(config(decode_max_total_tokens=10**9), free_bytes=2**30)


# Shared memory -----------------------------------------------------------------------------------


def give_shared_memory(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    stat = SimpleNamespace(f_bavail=free // 4096, f_blocks=total // 4096, f_frsize=4096)
    asked: list[object] = []

    def statvfs(path: object) -> SimpleNamespace:
        asked.append(path)
        assert path == "/dev/shm"
        return stat

    monkeypatch.setattr(sizing.os, "statvfs", statvfs)


def test_pools_that_fit_shared_memory_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = limits_of(config(max_total_tokens=640))
    wanted = (4 * 11 + 41) * pool_spec().bytes_per_page
    give_shared_memory(monkeypatch, total=2**30, free=-(-wanted // 4096) * 4096)
    check_shared_memory(limits, config())
    give_shared_memory(monkeypatch, total=2**30, free=wanted // 4096 * 4096 - 4096)
    with pytest.raises(CapacityError):
        check_shared_memory(limits, config())


def test_replicated_pools_need_no_shared_memory_but_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = limits_of(config("replicated", max_total_tokens=6400, decode_max_total_tokens=64))
    give_shared_memory(monkeypatch, total=2**30, free=2 * pool_spec().bytes_per_page + 4096)
    check_shared_memory(limits, config())


def test_a_full_shared_memory_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = limits_of(config(max_total_tokens=640))
    give_shared_memory(monkeypatch, total=2**33, free=8192)
    with pytest.raises(CapacityError) as refused:
        check_shared_memory(limits, config())
    message = str(refused.value)
    assert "too little shared memory in /dev/shm" in message
    assert f"{85 * pool_spec().bytes_per_page} bytes wanted" in message
    assert "8192 bytes free" in message
    assert "lower --max-total-tokens" in message
    assert "container" not in message


def test_a_containers_64_mb_have_their_own_message(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = limits_of(config(max_total_tokens=128 * 1024))
    give_shared_memory(monkeypatch, total=64 * MIB, free=64 * MIB)
    with pytest.raises(CapacityError) as refused:
        check_shared_memory(limits, config())
    message = str(refused.value)
    assert "a container's default of 64 MB" in message
    wanted = limits.decode_pool_bytes + 4 * limits.pool_bytes_per_rank
    assert f"--shm-size={-(-wanted // MIB) + 64}m" in message
    assert "lower --max-total-tokens" in message


def test_free_memory_is_the_least_of_ram_and_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_shared_memory(monkeypatch, total=2**33, free=40 * 4096)
    assert sizing.free_memory_bytes() == 40 * 4096
    give_shared_memory(monkeypatch, total=2**60, free=2**60)
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < sizing.free_memory_bytes() <= most

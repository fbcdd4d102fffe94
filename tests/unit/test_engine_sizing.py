"""Sizes: what a config gives on a machine, what is refused, and that no budget is overrun."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.sizing import MEMORY_SHARE
from cp_shared_kv.errors import CapacityError, ConfigError
from cp_shared_kv.layout.capacity import KVCapacity

from .sized_groups import MIB, MODEL_CONTEXT, Group, config, limits_of, pool_spec

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

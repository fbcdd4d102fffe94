"""What a config means on this machine for this model, worked out before any process starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from cp_shared_kv.engine.budget import (
    SCRATCH_LAYERS,
    capacity_of_rank,
    chunk_scratch_bytes,
    longest_prefix_pages,
    pages_at_once,
    prefix_scratch_bytes,
    reads_ahead,
    sharers,
)
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.config_values import READ_IN_BLOCKS
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.errors import CapacityError, ConfigError
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.memory.buffers import shared_memory_shortage
from cp_shared_kv.memory.pool import KVPoolSpec
from cp_shared_kv.memory.segment_names import SHARED_MEMORY_DIRECTORY
from cp_shared_kv.transfer.messages import MAX_TOKENS

MEMORY_SHARE = 0.5
"""Part of the free memory for pools and scratch when --max-total-tokens is not given."""
GPU_MEMORY_SHARE = 0.9
"""The same of a GPU, whose other memory has been set aside by then."""


@dataclass(frozen=True)
class MemoryPlace:
    """A GPU, or all of the host: what is free there, and who keeps KV in it."""

    free_bytes: int
    ranks: int
    decode_workers: int


def resolve_limits(
    config: EngineConfig,
    spec: KVPoolSpec,
    model_context_length: int,
    *,
    free_bytes: int = 0,
    gpus: Sequence[MemoryPlace] = (),
) -> EngineLimits:
    """Work out every size once, before any process starts.

    `free_bytes` of the host, or those of the `gpus` where there are any, are what pools and scratch
    may be made from when `--max-total-tokens` is not given; the scratch of the longest prefix is
    charged before the pools are sized.
    """
    context_length = config.context_length or min(model_context_length, MAX_TOKENS)
    if context_length > model_context_length:
        raise ConfigError(
            "--context-length exceeds what the model was made for",
            value=context_length,
            allowed=f"at most {model_context_length} (max_position_embeddings)",
        )
    page_size = config.page_size
    if config.max_total_tokens is not None:
        capacity = KVCapacity.from_tokens(config.max_total_tokens, page_size, sharers(config))
    else:
        share = GPU_MEMORY_SHARE if gpus else MEMORY_SHARE
        host = MemoryPlace(
            free_bytes, config.prefill_groups * config.cp_size, config.decode_workers
        )
        capacity = _sized_by_budget(config, spec, context_length, gpus or (host,), share)
    decode_tokens = config.decode_max_total_tokens or capacity.logical_tokens
    decode_capacity = KVCapacity.from_tokens(decode_tokens, page_size, 1)
    longest_pages = longest_prefix_pages(config, capacity, context_length)
    max_prefix_pages = capacity.logical_pages
    kv_scratch_tokens = None
    if config.resolved_kv_read in READ_IN_BLOCKS or reads_ahead(config):
        kv_scratch_tokens = pages_at_once(config, longest_pages) * page_size
    in_blocks = config.resolved_kv_read == "sparse" or config.kv_scratch_tokens is not None
    if config.resolved_kv_read != "local" and not in_blocks:  # which any batch can be read in
        max_prefix_pages = min(max_prefix_pages, SCRATCH_LAYERS * longest_pages)
    limits = EngineLimits(
        page_size=page_size,
        cp_size=config.cp_size,
        shared=config.shares_kv,
        physical_tokens_per_rank=capacity.physical_tokens,
        decode_tokens=decode_capacity.logical_tokens,
        context_length=context_length,
        scratch_limit_bytes=chunk_scratch_bytes(config, spec.sizes)
        + prefix_scratch_bytes(config, spec.sizes, longest_pages),
        max_prefix_pages=max_prefix_pages,
        kv_scratch_tokens=kv_scratch_tokens,
        pool_bytes_per_rank=spec.pool_bytes(capacity.physical_pages),
        decode_pool_bytes=spec.pool_bytes(decode_capacity.physical_pages),
    )
    if limits.longest_prompt_tokens < 1:
        raise ConfigError(
            "no prompt would fit",
            value=f"logical_tokens={limits.logical_tokens}, decode_tokens={limits.decode_tokens}, "
            f"context_length={context_length}",
            allowed="room for at least one prompt token and one output token",
        )
    return limits


def _sized_by_budget(
    config: EngineConfig,
    spec: KVPoolSpec,
    context_length: int,
    places: Sequence[MemoryPlace],
    share: float,
) -> KVCapacity:
    """The largest pools of which all ranks', their scratch and decode's stay within the budgets."""
    fitting = [_fitting_or_why(config, spec, context_length, place, share) for place in places]
    # More than a few contexts a rank would only lengthen the start of a small model.
    owners, page_size = sharers(config), config.page_size
    enough = KVCapacity.from_tokens(4 * context_length + page_size, page_size, owners)
    return min(enough, *filter(None, fitting), key=lambda c: c.physical_pages)


def _fitting_or_why(
    config: EngineConfig, spec: KVPoolSpec, context_length: int, place: MemoryPlace, share: float
) -> KVCapacity | None:
    """As `_fitting`; where nothing fits, the error names the flags that would mend it."""
    try:
        return _fitting(config, spec, context_length, place, share)
    except CapacityError as error:
        budget = f"{int(place.free_bytes * share)} bytes, {share:.0%} of what is free"
        too_little = error
    decode_tokens = config.decode_max_total_tokens
    if decode_tokens is not None:
        alike = replace(config, decode_max_total_tokens=None)
        with suppress(CapacityError):  # else the flag is not at fault, or not alone
            _fitting(alike, spec, context_length, place, share)
            raise ConfigError(
                "--decode-max-total-tokens leaves the ranks too little memory for KV",
                value=f"{decode_tokens}, of {budget}",
                change="lower it, or drop it for as many tokens as a group has",
            ) from too_little
    raise CapacityError(
        "the KV budget of a rank holds no page beside its scratch",
        value=budget,
        change="free memory, or lower --context-length or --chunked-prefill-size",
    ) from too_little


def _fitting(
    config: EngineConfig, spec: KVPoolSpec, context_length: int, place: MemoryPlace, share: float
) -> KVCapacity | None:
    """The largest pools that one place has room for; None where none of it is sized by it."""
    budget_bytes, ranks = int(place.free_bytes * share), place.ranks
    owners, page_size = sharers(config), config.page_size
    # A decode worker's pool is as large as a group's, unless it has its own size.
    decode_copies = place.decode_workers * owners
    if config.decode_max_total_tokens is not None:
        decode = KVCapacity.from_tokens(config.decode_max_total_tokens, page_size, 1)
        budget_bytes -= place.decode_workers * spec.pool_bytes(decode.physical_pages)
        decode_copies = 0
    copies = ranks + decode_copies
    if not ranks:
        if not copies:
            return None
        page_bytes = copies * spec.bytes_per_page
        return KVCapacity.from_budget(max(0, budget_bytes), page_bytes, page_size, owners)
    return capacity_of_rank(
        config,
        spec.sizes,
        rank_bytes=budget_bytes // ranks,
        context_length=context_length,
        page_bytes=-(-copies * spec.bytes_per_page // ranks),  # with a share of decode's page
    )


def free_memory_bytes() -> int:
    """Bytes that pools could take: the least of free RAM and free shared memory."""
    return min(free_ram_bytes(), free_shared_memory_bytes())


def free_ram_bytes() -> int:
    """Bytes of RAM that can be had without swapping."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    return available


def free_shared_memory_bytes() -> int:
    """Free bytes of /dev/shm."""
    stat = os.statvfs(SHARED_MEMORY_DIRECTORY)
    return stat.f_bavail * stat.f_frsize


def check_shared_memory(limits: EngineLimits, config: EngineConfig) -> None:
    """Refuse pools that shared memory cannot hold together, before any process starts."""
    wanted = config.decode_workers * limits.decode_pool_bytes
    if limits.shared:
        wanted += config.prefill_groups * limits.cp_size * limits.pool_bytes_per_rank
    if wanted > free_shared_memory_bytes():
        raise shared_memory_shortage(wanted)

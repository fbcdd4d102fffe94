"""GET /dashboard/state: all that the page at / shows, as counts, sizes, names and reasons.

Names are those of /server_info where it has the figure. Tokens are logical unless the name says
`physical`. No prompt, no output and no key is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cp_shared_kv.engine.api import (
    EngineDescription,
    EngineStats,
    Outcome,
    PoolPages,
    PrefillGroupStats,
    UnitState,
)
from cp_shared_kv.server.metrics import cache_hit_rate

MOST_CELLS = 2304
"""Ranges of pages that one answer counts, over all owners: this keeps it below 64 KiB."""
MOST_CELLS_A_ROW = 256


class DashboardCapacity(msgspec.Struct, kw_only=True):
    """What does not change: sizes, and how pages are shared out."""

    page_size: int
    cp_size: int
    prefill_groups: int
    decode_workers: int
    shard_policy: str
    kv_read: str
    router_policy: str
    physical_tokens_per_rank: int
    logical_tokens: int
    total_logical_tokens: int
    decode_tokens: int
    longest_prompt_tokens: int


class DashboardUsage(msgspec.Struct, kw_only=True):
    """Use of the pools, requests, and what has been counted since the start (`_total`)."""

    used_tokens: int
    available_tokens: int
    evictable_tokens: int
    decode_used_tokens: int
    queued_requests: int
    prefill_requests: int
    decode_queued_requests: int
    decode_requests: int
    cache_hit_rate: float
    recent_cache_hit_rate: float | None
    """Of the prompts of the last minute; null where there were none."""
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    evicted_tokens_total: int
    failed_transfers_total: int
    requests_total: dict[Outcome, int]


class DashboardRank(msgspec.Struct, kw_only=True):
    """What one rank has sent to decode and read from pools, since the start."""

    dp_rank: int
    cp_rank: int
    sent_pages_total: int
    sent_descriptors_total: int
    sent_bytes_total: int
    read_bytes_total: int
    scratch_bytes: int


class DashboardUnit(msgspec.Struct, kw_only=True):
    """How a prefill group or a decode worker is; its life is 1 until it is first started again."""

    unit: str
    life: int
    up: bool
    silent_seconds: float | None
    problems: list[str]


class DashboardOwner(msgspec.Struct, kw_only=True):
    """One owner's pages by range of physical pages. `cached` pages can be evicted, `locked` are
    in use by requests or transfers."""

    owner: int
    free: list[int]
    cached: list[int]
    locked: list[int]


class DashboardPool(msgspec.Struct, kw_only=True):
    """Whose pages are in which state: a prefill group's, or a decode worker's, which has one owner.

    Range b holds the physical pages b * `pages_per_bin` + 1 and on. `epoch` is in decimal digits,
    for it is too large for the numbers of JavaScript.
    """

    unit: str
    role: str
    epoch: str
    physical_pages: int
    pages_per_bin: int
    owners: list[DashboardOwner]


class DashboardState(msgspec.Struct, kw_only=True):
    """GET /dashboard/state. `usage` is null, and lists may be empty, while the engine is silent."""

    version: str
    model_name: str
    healthy: bool
    reason: str
    """Why it is not healthy; `ok` where it is."""
    capacity: DashboardCapacity
    usage: DashboardUsage | None
    ranks: list[DashboardRank]
    units: list[DashboardUnit]
    pools: list[DashboardPool]


def most_bins(description: EngineDescription) -> int:
    """Ranges that each owner's pages are counted in, at most."""
    rows = description.prefill_groups * description.cp_size + description.decode_workers
    return max(1, min(MOST_CELLS_A_ROW, MOST_CELLS // rows))


def dashboard_state(
    description: EngineDescription,
    health: tuple[bool, str],
    stats: EngineStats | None,
    units: Sequence[UnitState],
    pools: Sequence[PoolPages],
) -> DashboardState:
    """The state at this moment; without `stats` the engine does not answer."""
    healthy, reason = health
    return DashboardState(
        version=description.version,
        model_name=description.model_name,
        healthy=healthy and stats is not None,
        reason=reason if stats is not None or not healthy else "the engine does not answer",
        capacity=DashboardCapacity(
            page_size=description.page_size,
            cp_size=description.cp_size,
            prefill_groups=description.prefill_groups,
            decode_workers=description.decode_workers,
            shard_policy=description.shard_policy,
            kv_read=description.kv_read,
            router_policy=description.router_policy,
            physical_tokens_per_rank=description.physical_tokens_per_rank,
            logical_tokens=description.logical_tokens,
            total_logical_tokens=description.total_logical_tokens,
            decode_tokens=description.decode_tokens,
            longest_prompt_tokens=description.longest_prompt_tokens,
        ),
        usage=None if stats is None else _usage(stats),
        ranks=[] if stats is None else [r for group in stats.prefill for r in _ranks(group)],
        units=[
            DashboardUnit(
                unit=unit.unit,
                life=unit.life,
                up=unit.up,
                silent_seconds=unit.silent_seconds,
                problems=list(unit.problems),
            )
            for unit in units
        ],
        pools=[_pool(pool) for pool in pools],
    )


def _usage(stats: EngineStats) -> DashboardUsage:
    recent = stats.recent_prompt_tokens
    return DashboardUsage(
        used_tokens=stats.used_tokens,
        available_tokens=stats.available_tokens,
        evictable_tokens=stats.cached_tokens,
        decode_used_tokens=stats.decode_used_tokens,
        queued_requests=stats.queued_requests,
        prefill_requests=stats.prefill_requests,
        decode_queued_requests=stats.decode_queued_requests,
        decode_requests=stats.decode_requests,
        cache_hit_rate=cache_hit_rate(stats),
        recent_cache_hit_rate=stats.recent_cached_tokens / recent if recent else None,
        prompt_tokens_total=stats.prompt_tokens_total,
        cached_tokens_total=stats.cached_tokens_total,
        generated_tokens_total=stats.generated_tokens_total,
        evicted_tokens_total=stats.evicted_tokens_total,
        failed_transfers_total=stats.failed_transfers_total,
        requests_total=dict(stats.requests_total),
    )


def _ranks(group: PrefillGroupStats) -> list[DashboardRank]:
    return [
        DashboardRank(
            dp_rank=group.index,
            cp_rank=rank,
            sent_pages_total=group.sent_pages_total[rank],
            sent_descriptors_total=group.sent_descriptors_total[rank],
            sent_bytes_total=group.sent_bytes_total[rank],
            read_bytes_total=group.read_bytes_total[rank],
            scratch_bytes=group.scratch_bytes[rank],
        )
        for rank in range(len(group.sent_pages_total))
    ]


def _pool(pool: PoolPages) -> DashboardPool:
    rows = zip(pool.free, pool.cached, pool.locked, strict=True)
    return DashboardPool(
        unit=pool.unit,
        role=pool.role,
        epoch=str(pool.epoch),
        physical_pages=pool.physical_pages,
        pages_per_bin=pool.pages_per_bin,
        owners=[
            DashboardOwner(owner=owner, free=list(free), cached=list(cached), locked=list(locked))
            for owner, (free, cached, locked) in enumerate(rows)
        ],
    )

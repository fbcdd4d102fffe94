"""GET /v1/loads: how busy the engine is, in the form that SGLang's routers read."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from cp_shared_kv.engine.api import EngineDescription, EngineStats, PrefillGroupStats


class Load(msgspec.Struct, kw_only=True):
    """One data-parallel rank; a group of context-parallel ranks counts as one. Tokens are logical.

    `num_running_reqs` are those in prefill, in transfer or in decode.
    """

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    cache_hit_rate: float


class TotalLoad(msgspec.Struct, kw_only=True):
    """All ranks together."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float


class Loads(msgspec.Struct, kw_only=True):
    """GET /v1/loads. Of SGLang's figures those that this engine has."""

    timestamp: str
    version: str
    loads: list[Load]
    aggregate: TotalLoad
    dp_rank_count: int


def loads(description: EngineDescription, stats: EngineStats) -> Loads:
    """The load at this moment. What decodes is not bound to a prefill group: it is counted with
    the first."""
    groups = [
        _load(description, group, stats.decode_requests if place == 0 else 0)
        for place, group in enumerate(stats.prefill)
    ]
    running = sum(load.num_running_reqs for load in groups)
    waiting = sum(load.num_waiting_reqs for load in groups)
    return Loads(
        timestamp=datetime.now(UTC).isoformat(),
        version=description.version,
        loads=groups,
        aggregate=TotalLoad(
            total_running_reqs=running,
            total_waiting_reqs=waiting,
            total_reqs=running + waiting,
            avg_token_usage=sum(load.token_usage for load in groups) / len(groups),
        ),
        dp_rank_count=len(groups),
    )


def _load(description: EngineDescription, group: PrefillGroupStats, decoding: int) -> Load:
    running = group.running_requests + decoding
    return Load(
        dp_rank=group.index,
        num_running_reqs=running,
        num_waiting_reqs=group.queued_requests,
        num_total_reqs=running + group.queued_requests,
        num_used_tokens=group.locked_tokens,
        max_total_num_tokens=description.logical_tokens,
        token_usage=group.locked_tokens / description.logical_tokens,
        cache_hit_rate=group.cached_tokens_total / max(1, group.prompt_tokens_total),
    )

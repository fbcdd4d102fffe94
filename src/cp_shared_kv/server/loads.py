"""GET /v1/loads: how busy the engine is, in the form that SGLang's routers read."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from cp_shared_kv.engine.api import EngineDescription, EngineStats
from cp_shared_kv.server.metrics import cache_hit_rate


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
    dp_rank_count: int = 1


def loads(description: EngineDescription, stats: EngineStats) -> Loads:
    """The load at this moment."""
    running = stats.prefill_requests + stats.decode_requests
    waiting = stats.queued_requests
    usage = stats.used_tokens / description.logical_tokens
    load = Load(
        dp_rank=0,
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=stats.used_tokens,
        max_total_num_tokens=description.logical_tokens,
        token_usage=usage,
        cache_hit_rate=cache_hit_rate(stats),
    )
    return Loads(
        timestamp=datetime.now(UTC).isoformat(),
        version=description.version,
        loads=[load],
        aggregate=TotalLoad(
            total_running_reqs=running,
            total_waiting_reqs=waiting,
            total_reqs=running + waiting,
            avg_token_usage=usage,
        ),
    )

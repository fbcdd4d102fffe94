"""/server_info: the engine's settings, sizes and use as JSON; the same figures as /metrics."""

from __future__ import annotations

from typing import Any

from cp_shared_kv.engine.api import EngineDescription, EngineStats
from cp_shared_kv.server.metrics import cache_hit_rate


def server_info(description: EngineDescription, stats: EngineStats | None) -> dict[str, Any]:
    """Settings by flag name at the top, where SGLang's clients look for them, and below them our
    own groups. `usage`, `ranks` and `totals` are null while the engine does not answer.
    """
    return {
        **description.config,
        "version": description.version,
        "served_model_name": description.model_name,
        "context_length": description.context_length,
        "page_size": description.page_size,
        "max_total_num_tokens": description.total_logical_tokens,
        "max_req_input_len": description.longest_prompt_tokens,
        "capacity": {
            "logical_tokens": description.logical_tokens,
            "logical_pages": description.logical_pages,
            "physical_tokens_per_rank": description.physical_tokens_per_rank,
            "cp_size": description.cp_size,
            "prefill_groups": description.prefill_groups,
            "decode_workers": description.decode_workers,
            "shard_policy": description.shard_policy,
            "kv_read": description.kv_read,
            "decode_tokens": description.decode_tokens,
            "longest_prompt_tokens": description.longest_prompt_tokens,
            "pool_bytes_per_rank": description.pool_bytes_per_rank,
            "scratch_limit_bytes": description.scratch_limit_bytes,
        },
        "usage": None if stats is None else _usage(description, stats),
        "totals": None if stats is None else _totals(stats),
        "ranks": None if stats is None else _ranks(description, stats),
        # SGLang's benchmark client looks into the first of these.
        "internal_states": [{}],
    }


def _usage(description: EngineDescription, stats: EngineStats) -> dict[str, Any]:
    return {
        "used_tokens": stats.used_tokens,
        "available_tokens": stats.available_tokens,
        "evictable_tokens": stats.cached_tokens,
        "token_usage": stats.used_tokens / description.total_logical_tokens,
        "cache_hit_rate": cache_hit_rate(stats),
        "decode_used_tokens": stats.decode_used_tokens,
        "queued_requests": stats.queued_requests,
        "prefill_requests": stats.prefill_requests,
        "decode_queued_requests": stats.decode_queued_requests,
        "decode_requests": stats.decode_requests,
    }


def _totals(stats: EngineStats) -> dict[str, Any]:
    return {
        "prompt_tokens": stats.prompt_tokens_total,
        "cached_tokens": stats.cached_tokens_total,
        "generated_tokens": stats.generated_tokens_total,
        "evicted_tokens": stats.evicted_tokens_total,
        "failed_transfers": stats.failed_transfers_total,
        "requests": dict(stats.requests_total),
        "restarts": dict(stats.restarts_total),
    }


def _ranks(description: EngineDescription, stats: EngineStats) -> list[dict[str, int]]:
    ranks: list[dict[str, int]] = []
    for group in stats.prefill:
        # A replicated group has one owner of everything, so the lists may differ in length.
        columns = {
            "free_pages": group.free_pages_per_owner,
            "sent_pages": group.sent_pages_total,
            "sent_descriptors": group.sent_descriptors_total,
            "sent_bytes": group.sent_bytes_total,
            "read_bytes": group.read_bytes_total,
            "scratch_bytes": group.scratch_bytes,
        }
        ranks += [
            {"dp_rank": group.index, "cp_rank": rank}
            | {name: values[rank] for name, values in columns.items() if rank < len(values)}
            for rank in range(description.cp_size)
        ]
    return ranks

"""Sizes: scratch is paid for first, the pool is physical, the scheduler sees logical tokens."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

import logging
from dataclasses import dataclass

from cp_shared_kv.integrations.sglang import ATTRIBUTE, settings
from cp_shared_kv.integrations.sglang.page_formats import pool_spec
from cp_shared_kv.integrations.sglang.support import PAGE_SIZE
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.memory.page_format import PAGE_KINDS
from cp_shared_kv.memory.pool import KVPoolSpec
from cp_shared_kv.reads.full_view import PAGES_PER_ROUND

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScratchSize:
    """The most that one batch may read and stage: whole pages of a layer or two of each kind."""

    batch_pages: int
    """Pages of a batch's prefixes and chunk."""
    limit_bytes: int

    @classmethod
    def of(cls, spec: KVPoolSpec, batch_tokens: int, cp_size: int, layers: int) -> ScratchSize:
        """With the pages that padding points at, and the buffer of a gather."""
        pages = -(-batch_tokens // PAGE_SIZE)
        page_bytes = [spec.page_bytes(kind) for kind in PAGE_KINDS]
        gather_bytes = PAGES_PER_ROUND * (cp_size + 1) * max(page_bytes)
        return cls(pages, layers * (pages + 1) * sum(page_bytes) + gather_bytes)


def model_pool_spec(runner, more_layers: int = 0) -> KVPoolSpec:
    """The pages of the model that this runner runs, or of one with so many layers more."""
    from sglang.srt.configs.model_config import get_nsa_index_head_dim

    config = runner.model_config
    return pool_spec(
        runner.calculate_mla_kv_cache_dim(),
        config.kv_lora_rank,
        config.qk_rope_head_dim,
        get_nsa_index_head_dim(config.hf_config),
        runner.num_effective_layers + more_layers,
    )


def draft_layers(runner) -> int:
    """Next-token layers that draft for this runner's model, whose KV is in a pool of their own.

    SGLang makes that pool after the model's and of as many tokens, from memory that it has not set
    apart. Their rows are the model's, see support.py.
    """
    if runner.spec_algorithm.is_none():
        return 0
    return getattr(runner.model_config.hf_config, "num_nextn_predict_layers", None) or 1


def scratch_size(runner) -> ScratchSize:
    """The scratch of this runner's batches. ConfigError for a setting that is too small."""
    args = runner.server_args
    chunk = args.chunked_prefill_size or 0
    chunk_tokens = chunk if chunk > 0 else args.max_prefill_tokens
    tokens = settings.scratch_tokens(runner.model_config.context_len, chunk_tokens)
    # Whether they can be pulled is known once there are pools, which this is taken from.
    may_pull = args.device == "cuda" and settings.read() != "collective"
    layers = settings.LAYERS_WHERE_PULLED if may_pull else 1
    return ScratchSize.of(model_pool_spec(runner), tokens, args.attn_cp_size, layers)


def charge_scratch(available_bytes: int, self, _pre_model_load_memory) -> int:
    """After _profile_available_bytes: what scratch leaves of the memory for KV."""
    if not getattr(self.server_args, ATTRIBUTE):
        return available_bytes
    scratch_bytes = scratch_size(self).limit_bytes
    _log.info("CP shared KV: scratch_bytes=%d are set aside for one batch", scratch_bytes)
    self.cp_shared_kv_budget_bytes = available_bytes - scratch_bytes
    return self.cp_shared_kv_budget_bytes


def resolve(original, self, pre_model_load_memory):
    """Around _resolve_memory_pool_config: the group's tokens for all that schedules.

    SGLang's count of bytes a token leaves out the scales of fp8 rows, so the pool is sized by the
    core. --max-total-tokens goes on to mean tokens of one rank. Neither changes how many requests
    may run: their table would take memory that nobody has charged.
    """
    config = original(self, pre_model_load_memory)
    if not getattr(self.server_args, ATTRIBUTE):
        return config
    args = self.server_args
    fits = KVCapacity.from_budget(
        max(0, self.cp_shared_kv_budget_bytes),
        model_pool_spec(self, draft_layers(self)).bytes_per_page,
        PAGE_SIZE,
        args.attn_cp_size,
    )
    physical_tokens = min(config.max_total_num_tokens, fits.physical_tokens)
    capacity = KVCapacity.from_tokens(physical_tokens, PAGE_SIZE, args.attn_cp_size)
    self.cp_shared_kv_capacity = capacity
    config.max_total_num_tokens = capacity.logical_tokens
    return config


def report_pool(capacity: KVCapacity) -> None:
    """The first of two lines at startup, which docs/sglang.md shows: what has been built."""
    _log.info(
        "CP shared KV enabled. physical_tokens_per_rank=%d, logical_tokens=%d, cp_size=%d, "
        "shard_policy=page_interleaved",
        capacity.physical_tokens,
        capacity.logical_tokens,
        capacity.cp_size,
    )


def report_to_scheduler(info, self):
    """After get_worker_info, which the scheduler takes its capacity from: the second line.

    It shows what the scheduler was told, not what it should have been told.
    """
    capacity = getattr(self.model_runner, "cp_shared_kv_capacity", None)
    if capacity is not None:
        _log.info(
            "CP shared KV scheduler capacity: logical_tokens=%d, physical_tokens_per_rank=%d, "
            "cp_size=%d",
            info[0],
            capacity.physical_tokens,
            capacity.cp_size,
        )

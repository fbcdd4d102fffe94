"""Which functions of SGLang are wrapped, where, and what for; and what else must not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_KV_MIXIN = "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin"
_MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
_POOLS = "sglang.srt.mem_cache"

HookKind = Literal["after", "around"]


@dataclass(frozen=True)
class Hook:
    """One wrapped function: `implementation` is module:function below this package."""

    target: str
    kind: HookKind
    implementation: str
    purpose: str


DOOR = (
    Hook(f"{_SERVER_ARGS}.add_cli_args", "after", "flags:add_argument", "the flag"),
    Hook(f"{_SERVER_ARGS}.__init__", "around", "flags:construct", "the field of ServerArgs"),
    Hook(f"{_SERVER_ARGS}.__post_init__", "after", "flags:validate", "what is refused and set"),
)
"""In every process that SGLang loads plugins in. They do nothing unless the flag is given."""

GUARD = (
    Hook(f"{_KV_MIXIN}.init_memory_pool", "around", "pools:guard", "no pool without all hooks"),
)
"""In every scheduler process, so that a flag whose other hooks are missing stops the server."""

WORKER = (
    Hook(f"{_KV_MIXIN}._profile_available_bytes", "after", "capacity:charge_scratch", "scratch"),
    Hook(
        f"{_KV_MIXIN}._resolve_memory_pool_config",
        "around",
        "capacity:resolve",
        "logical tokens for the scheduler, physical ones for the pool",
    ),
    Hook(f"{_KV_MIXIN}._init_pools", "around", "pools:build", "our pool and allocator"),
    Hook(
        "sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info",
        "after",
        "capacity:report_to_scheduler",
        "the scheduler's line at startup",
    ),
    Hook(
        "sglang.srt.layers.attention.nsa_backend.NativeSparseAttnBackend.init_forward_metadata",
        "after",
        "reads:begin_batch",
        "the plan of a batch; page tables of scratch",
    ),
    Hook(
        "sglang.srt.layers.attention.nsa.nsa_indexer.Indexer._store_index_k_cache",
        "around",
        "writes:store_index_k",
        "index K into scratch, owned rows into the pool",
    ),
    Hook(
        "sglang.srt.disaggregation.utils.filter_kv_indices_for_cp_rank",
        "around",
        "sender:owned_pages",
        "physical pages and their positions",
    ),
    Hook(
        f"{_MOONCAKE}.MooncakeKVManager.add_transfer_request",
        "around",
        "sender:admit_chunk",
        "positions checked before anything is sent",
    ),
    Hook(
        f"{_MOONCAKE}.MooncakeKVManager.maybe_send_extra",
        "around",
        "sender:send_state",
        "index K by the same plan; its failures are kept",
    ),
    Hook(
        f"{_MOONCAKE}.MooncakeKVManager.send_aux",
        "around",
        "sender:send_aux",
        "no success after failed index K",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        "around",
        "admission:add_one_req",
        "batches that scratch holds",
    ),
)
"""In scheduler processes of a server that was started with the flag."""

RELIED_ON = (
    f"{_POOLS}.memory_pool.KVCache",
    f"{_POOLS}.memory_pool.MLATokenToKVPool",
    f"{_POOLS}.memory_pool.NSATokenToKVPool",
    f"{_POOLS}.allocator.BaseTokenToKVPoolAllocator",
    f"{_POOLS}.allocator.PagedTokenToKVPoolAllocator",
    f"{_KV_MIXIN}._apply_memory_pool_config",
    f"{_KV_MIXIN}._resolve_max_num_reqs",
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator",
    "sglang.srt.layers.attention.nsa_backend.NSAMetadata",
    "sglang.srt.layers.attention.nsa_backend.NativeSparseAttnBackend.forward_extend",
    "sglang.srt.layers.attention.nsa.nsa_indexer.Indexer.forward_cuda",
    "sglang.srt.layers.attention.nsa.nsa_indexer.Indexer._get_topk_ragged",
    "sglang.srt.layers.attention.nsa.nsa_indexer.Indexer._get_topk_ragged_with_cp",
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager",
    "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk",
    "sglang.srt.disaggregation.common.conn.CommonKVManager.__init__",
    f"{_MOONCAKE}.TransferInfo",
    f"{_MOONCAKE}.MooncakeKVManager.transfer_worker",
    f"{_MOONCAKE}.MooncakeKVManager.send_kvcache",
    f"{_MOONCAKE}.MooncakeKVSender.send",
    "sglang.srt.speculative.eagle_worker.EAGLEWorker.forward_draft_extend",
    "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_prefill",
    "sglang.srt.models.deepseek_nextn.DeepseekModelNextN.forward",
    "sglang.srt.plugins.hook_registry.HookRegistry",
    "sglang.srt.plugins.hook_registry._wrap_fn",
)
"""Not wrapped, but what the wrapped ones rely on: a changed one is refused alike."""

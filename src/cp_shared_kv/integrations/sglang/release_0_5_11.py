"""SGLang 0.5.11 as it was tested. Fingerprints: `python -m cp_shared_kv.integrations.sglang.fingerprints`."""

from __future__ import annotations

from collections.abc import Mapping

STATE_IS_LIST_OF_COMPONENTS = False

FINGERPRINTS: Mapping[str, str] = {
    "sglang.srt.disaggregation.common.conn.CommonKVManager.__init__": "53b167432e295d48",
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.add_transfer_request": "90d5ad9c7d984d4a",
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.maybe_send_extra": "ff24beeb40e4d45d",
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.send_aux": "134b50a00eacee96",
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.send_kvcache": "44b2473af9da74d1",
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.transfer_worker": "6ecfded827c55494",
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVSender.send": "6ef871752c65b1ce",
    "sglang.srt.disaggregation.mooncake.conn.TransferInfo": "6c79103c5a60c728",
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager": "957b3e8228025241",
    "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk": "140cd594b11d0328",
    "sglang.srt.disaggregation.utils.filter_kv_indices_for_cp_rank": "7cce33d97d7bb0cc",
    "sglang.srt.layers.attention.nsa.nsa_indexer.Indexer._get_topk_ragged": "89b2c52f3d5e51e7",
    "sglang.srt.layers.attention.nsa.nsa_indexer.Indexer._get_topk_ragged_with_cp": "d15f18be6fc00539",
    "sglang.srt.layers.attention.nsa.nsa_indexer.Indexer._store_index_k_cache": "7de843ae8df2cd63",
    "sglang.srt.layers.attention.nsa.nsa_indexer.Indexer.forward_cuda": "b37bf24957e2c73f",
    "sglang.srt.layers.attention.nsa_backend.NSAMetadata": "38a913a81f4e6934",
    "sglang.srt.layers.attention.nsa_backend.NativeSparseAttnBackend.forward_extend": "d5c29a020a6ba339",
    "sglang.srt.layers.attention.nsa_backend.NativeSparseAttnBackend.init_forward_metadata": "588e0d42e750b6de",
    "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req": "48858fddbbbfd637",
    "sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info": "72e1115cfea9e3c9",
    "sglang.srt.mem_cache.allocator.BaseTokenToKVPoolAllocator": "75f734c70aab4144",
    "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator": "03e435badf3acec8",
    "sglang.srt.mem_cache.memory_pool.KVCache": "446097978d322575",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool": "190bc71c1ce47ee6",
    "sglang.srt.mem_cache.memory_pool.NSATokenToKVPool": "572b2b3e66a29453",
    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._apply_memory_pool_config": "d9cd27b7da65e412",
    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._init_pools": "8b380f47fbb0918a",
    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._profile_available_bytes": "1c27a43b0d45cf06",
    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._resolve_max_num_reqs": "e70317cabd157750",
    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._resolve_memory_pool_config": "00c1671a373fe8a1",
    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin.init_memory_pool": "ce9f588ec278c3d5",
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator": "c6b66a3ea91f4f74",
    "sglang.srt.models.deepseek_nextn.DeepseekModelNextN.forward": "d24fcf2523412ff5",
    "sglang.srt.plugins.hook_registry.HookRegistry": "f6f48a4906fc8fa3",
    "sglang.srt.plugins.hook_registry._wrap_fn": "921000a26da2c727",
    "sglang.srt.server_args.ServerArgs.__post_init__": "8a8a56ceeed7a5f7",
    "sglang.srt.server_args.ServerArgs.add_cli_args": "ffa944def0a1d83a",
    "sglang.srt.speculative.eagle_worker.EAGLEWorker.forward_draft_extend": "d40f1be1d44c18ca",
    "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_prefill": "5aa72507dc02a60c",
}

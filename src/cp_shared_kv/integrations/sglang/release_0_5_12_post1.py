"""SGLang 0.5.12.post1 as it was tested. Fingerprints: `python -m cp_shared_kv.integrations.sglang.fingerprints`."""

from __future__ import annotations

from collections.abc import Mapping

STATE_IS_LIST_OF_COMPONENTS = True

FINGERPRINTS: Mapping[str, str] = {
    "sglang.srt.disaggregation.common.conn.CommonKVManager.__init__": "4be629593fd003e1",
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.add_transfer_request": "89a2927a59d6369d",
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.maybe_send_extra": "2615cf969494a283",
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.send_aux": "134b50a00eacee96",
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.send_kvcache": "44b2473af9da74d1",
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.transfer_worker": "7591c7f7275a1c7d",
    "sglang.srt.disaggregation.mooncake.conn.MooncakeKVSender.send": "b0a302572c0c3bee",
    "sglang.srt.disaggregation.mooncake.conn.TransferInfo": "e8ec2c3c1ff00375",
    "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue._init_kv_manager": "127fb0081e954c01",
    "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk": "09d681f5a53d7346",
    "sglang.srt.disaggregation.utils.filter_kv_indices_for_cp_rank": "7cce33d97d7bb0cc",
    "sglang.srt.layers.attention.nsa.nsa_indexer.Indexer._get_topk_ragged": "ffa9cf3902c847a7",
    "sglang.srt.layers.attention.nsa.nsa_indexer.Indexer._get_topk_ragged_with_cp": "d15f18be6fc00539",
    "sglang.srt.layers.attention.nsa.nsa_indexer.Indexer._store_index_k_cache": "41e02b22844f222f",
    "sglang.srt.layers.attention.nsa.nsa_indexer.Indexer.forward_cuda": "244ecf19a3642d36",
    "sglang.srt.layers.attention.nsa_backend.NSAMetadata": "38a913a81f4e6934",
    "sglang.srt.layers.attention.nsa_backend.NativeSparseAttnBackend.forward_extend": "d5c29a020a6ba339",
    "sglang.srt.layers.attention.nsa_backend.NativeSparseAttnBackend.init_forward_metadata": "7e0c009c3a163dc9",
    "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req": "9aa9423c9d9625a3",
    "sglang.srt.managers.tp_worker.TpModelWorker.get_worker_info": "72e1115cfea9e3c9",
    "sglang.srt.mem_cache.allocator.BaseTokenToKVPoolAllocator": "eb996cd827ba0958",
    "sglang.srt.mem_cache.allocator.PagedTokenToKVPoolAllocator": "ff25db5cafa333bb",
    "sglang.srt.mem_cache.memory_pool.KVCache": "446097978d322575",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool": "190bc71c1ce47ee6",
    "sglang.srt.mem_cache.memory_pool.NSATokenToKVPool": "094c04da7e1324c3",
    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._apply_memory_pool_config": "a7083f49b3304a63",
    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._init_pools": "5d64c1bc125168c9",
    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._profile_available_bytes": "1c27a43b0d45cf06",
    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._resolve_max_num_reqs": "e70317cabd157750",
    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin._resolve_memory_pool_config": "00c1671a373fe8a1",
    "sglang.srt.model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin.init_memory_pool": "ce9f588ec278c3d5",
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator": "c6b66a3ea91f4f74",
    "sglang.srt.models.deepseek_nextn.DeepseekModelNextN.forward": "d24fcf2523412ff5",
    "sglang.srt.plugins.hook_registry.HookRegistry": "f6f48a4906fc8fa3",
    "sglang.srt.plugins.hook_registry._wrap_fn": "921000a26da2c727",
    "sglang.srt.server_args.ServerArgs.__post_init__": "10e556b14163eb4d",
    "sglang.srt.server_args.ServerArgs.add_cli_args": "0feb960f3bbee2cc",
    "sglang.srt.speculative.eagle_worker.EAGLEWorker.forward_draft_extend": "6fda39a2268ab505",
    "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_prefill": "e004773e738b0380",
}

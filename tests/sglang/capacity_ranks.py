"""One rank of a group: SGLang's own sizing and building of pools, with our hooks in it."""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import cpu_stand_ins  # noqa: F401 (before SGLang)
import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor import model_runner_kv_cache_mixin as mixin
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from cp_shared_kv.errors import StartupError
from cp_shared_kv.integrations.sglang import ATTRIBUTE, plugin
from cp_shared_kv.integrations.sglang.hooks import GUARD, WORKER
from cp_shared_kv.testing.rank_process import RankContext

GIB = 1 << 30
LAYERS, DRAFT_LAYERS, CONTEXT, CHUNK = 3, 1, 2048, 512


class Runner(mixin.ModelRunnerKVCacheMixin):
    """As much of a ModelRunner as sizing and building look at."""

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        *,
        flag: bool,
        limit: int | None,
        drafts: bool = False,
        target: Runner | None = None,
    ) -> None:
        """drafts: whether the server speculates; target: whom this one drafts for."""
        args = ServerArgs(model_path="dummy", **{ATTRIBUTE: flag})
        args.page_size, args.attn_cp_size, args.context_length = 64, size, CONTEXT
        args.chunked_prefill_size, args.max_total_tokens = CHUNK, limit
        args.disaggregation_mode, args.mem_fraction_static = "prefill", 0.9
        set_global_server_args_for_scheduler(args)
        hf = types.SimpleNamespace(
            architectures=["DeepseekV32ForCausalLM"],
            index_topk=2048,
            index_head_dim=128,
            num_nextn_predict_layers=DRAFT_LAYERS,
        )
        self.server_args, self.kv_cache_dtype = args, dtype
        self.model_config = types.SimpleNamespace(
            hf_config=hf, kv_lora_rank=512, qk_rope_head_dim=64, context_len=CONTEXT
        )
        self.device, self.gpu_id, self.page_size, self.dp_size, self.pp_size = "cpu", 0, 64, 1, 1
        self.mem_fraction_static, self.mambaish_config = 0.9, None
        self.use_mla_backend, self.enable_hisparse = True, False
        self.is_draft_worker = target is not None
        self.is_hybrid_swa = self.is_hybrid_swa_compress = False
        layers = DRAFT_LAYERS if self.is_draft_worker else LAYERS
        self.num_effective_layers, self.start_layer, self.end_layer = layers, 0, layers
        self.spec_algorithm = types.SimpleNamespace(
            is_none=lambda: not drafts, is_dflash=lambda: False
        )
        self.req_to_token_pool = self.token_to_kv_pool_allocator = None
        if target is not None:  # as SGLang's workers are given them
            self.req_to_token_pool = target.req_to_token_pool
            self.token_to_kv_pool_allocator = target.token_to_kv_pool_allocator
            self.memory_pool_config = target.memory_pool_config
        self.forward_stream = None


@contextlib.contextmanager
def _memory(context: RankContext, free_bytes: int) -> Iterator[None]:
    world = types.SimpleNamespace(world_size=context.size, cpu_group=None)
    cp = types.SimpleNamespace(device_group=context.process_group)
    with (
        mock.patch.object(mixin, "get_available_gpu_memory", return_value=free_bytes / GIB),
        mock.patch.object(mixin, "get_world_group", return_value=world),
        mock.patch.object(parallel_state, "get_attn_cp_group", return_value=cp),
        mock.patch(
            "sglang.srt.model_executor.pool_configurator.get_attention_tp_size", return_value=1
        ),
    ):
        yield


def _hooked() -> None:
    load_plugins()
    if not any(hook.target in HookRegistry._hooks for hook in WORKER):
        plugin._register(GUARD + WORKER)
        HookRegistry.apply_hooks()


def build(
    context: RankContext,
    dtype: str,
    flag: bool,
    free_bytes: int,
    limit: int | None,
    drafts: bool = False,
) -> dict[str, Any]:
    """init_memory_pool with that many bytes free, of a model and its draft: what came of it."""
    _hooked()
    torch_dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float8_e4m3fn
    runner = Runner(context.size, torch_dtype, flag=flag, limit=limit, drafts=drafts)
    draft = None
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("cp_shared_kv")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with _memory(context, free_bytes):
            runner.init_memory_pool(0)
            if drafts:
                draft = Runner(
                    context.size, torch_dtype, flag=flag, limit=limit, drafts=True, target=runner
                )
                draft.init_memory_pool(0)
        worker = types.SimpleNamespace(
            max_total_num_tokens=runner.max_total_num_tokens,
            max_prefill_tokens=0,
            max_running_requests=runner.max_running_requests,
            max_queued_requests=0,
            max_req_len=0,
            max_req_input_len=0,
            random_seed=0,
            device="cpu",
            model_runner=runner,
        )
        told = TpModelWorker.get_worker_info(worker)[0]
    finally:
        logger.removeHandler(handler)
    pool = runner.token_to_kv_pool
    return {
        "pool": type(pool).__name__,
        "allocator": type(runner.token_to_kv_pool_allocator).__name__,
        "told": told,
        "max_total_num_tokens": runner.max_total_num_tokens,
        "allocator_size": runner.token_to_kv_pool_allocator.size,
        "available": runner.token_to_kv_pool_allocator.available_size(),
        "pool_size": pool.size,
        "pool_bytes": int(pool.get_kv_size_bytes()),
        "rows": pool.kv_buffer[0].shape[0],
        "scratch_bytes": pool.sharing.scratch.limit_bytes if flag else 0,
        "requests": runner.max_running_requests,
        "lines": lines,
        "draft": None if draft is None else _draft_built(runner, draft),
    }


def _draft_built(target: Runner, draft: Runner) -> dict[str, Any]:
    pool = draft.token_to_kv_pool
    return {
        "pool": type(pool).__name__,
        "pool_size": pool.size,
        "pool_bytes": int(pool.get_kv_size_bytes()),
        "rows": pool.kv_buffer[0].shape[0],
        "same scratch": pool.sharing is target.token_to_kv_pool.sharing,
        "same allocator": draft.token_to_kv_pool_allocator is target.token_to_kv_pool_allocator,
    }


def build_with_a_hook_missing(context: RankContext) -> str:
    """What init_memory_pool says when SGLang has not applied one of the hooks."""
    _hooked()
    runner = Runner(context.size, torch.bfloat16, flag=True, limit=None)
    rest = HookRegistry._patched - {WORKER[7].target}
    try:
        with _memory(context, GIB), mock.patch.object(HookRegistry, "_patched", rest):
            runner.init_memory_pool(0)
    except StartupError as error:
        return str(error)
    return "built"

"""A plan's sizes as the processes of a real run would be told them."""

from __future__ import annotations

from pathlib import Path

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.testing.world.answers import EOS, VOCAB_SIZE
from cp_shared_kv.testing.world.memory import PAGE_LAYOUT
from cp_shared_kv.testing.world.plan import CONTEXT_LENGTH, PAGE_SIZE, Plan


def run_spec(plan: Plan) -> RunSpec:
    """The file that every process of the run reads at birth."""
    shape = plan.shape
    several = shape.cp_size > 1
    config = EngineConfig(
        model_path=Path("/models/none"),
        page_size=PAGE_SIZE,
        chunked_prefill_size=shape.chunk_tokens,
        max_running_requests=shape.max_running,
        max_queued_requests=shape.max_queued,
        attention_context_parallel_size=shape.cp_size,
        prefill_groups=shape.groups,
        decode_workers=shape.workers,
        router_policy=shape.router_policy,
        verify_kv_transfer=shape.verify,
        disable_radix_cache=not shape.prefix_caching,
        enable_nsa_prefill_context_parallel=several,
        enable_nsa_prefill_cp_shared_kv=several,
    )
    return RunSpec(
        run_id=f"seed-{plan.seed}",
        run_dir="/nowhere",
        supervisor_pid=1,
        config=config.as_plain(),
        limits=EngineLimits(
            page_size=PAGE_SIZE,
            cp_size=shape.cp_size,
            shared=several,
            physical_tokens_per_rank=shape.physical_pages * PAGE_SIZE,
            decode_tokens=shape.decode_pages * PAGE_SIZE,
            context_length=CONTEXT_LENGTH,
            scratch_limit_bytes=0,
            max_prefix_pages=shape.max_prefix_pages,
            pool_bytes_per_rank=0,
            decode_pool_bytes=0,
        ),
        page_layout=PAGE_LAYOUT,
        model_fingerprint="none",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(EOS,),
    )

"""What the processes of a run are told, of a model that nobody runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.run_spec import PageLayout, RunSpec


def bare_run_spec(
    *,
    page_size: int,
    cp_size: int,
    chunk_tokens: int,
    physical_pages: int,
    decode_tokens: int,
    context_length: int,
    max_prefix_pages: int,
    vocab_size: int,
    eos_token_id: int,
    bytes_per_page: int = 1,
    **config: Any,
) -> RunSpec:
    """A run whose groups share their KV, `physical_pages` a rank; the rest is set in its config."""
    return RunSpec(
        run_id="bare",
        run_dir="/nowhere",
        supervisor_pid=1,
        config=EngineConfig(
            model_path=Path("/models/none"),
            page_size=page_size,
            chunked_prefill_size=chunk_tokens,
            attention_context_parallel_size=cp_size,
            enable_nsa_prefill_context_parallel=True,
            enable_nsa_prefill_cp_shared_kv=True,
            **config,
        ).as_plain(),
        limits=EngineLimits(
            page_size=page_size,
            cp_size=cp_size,
            shared=True,
            physical_tokens_per_rank=physical_pages * page_size,
            decode_tokens=decode_tokens,
            context_length=context_length,
            scratch_limit_bytes=0,
            max_prefix_pages=max_prefix_pages,
            pool_bytes_per_rank=0,
            decode_pool_bytes=0,
        ),
        page_layout=PageLayout(
            latent_format="l",
            index_format="i",
            num_layers=1,
            index_layers=(),
            bytes_per_page=bytes_per_page,
        ),
        model_fingerprint="m",
        vocab_size=vocab_size,
        eos_token_ids=(eos_token_id,),
    )

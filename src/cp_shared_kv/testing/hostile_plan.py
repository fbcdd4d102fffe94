"""Sizes and requests of a group that is tested without processes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.messages import Submit
from cp_shared_kv.engine.run_spec import PageLayout, RunSpec
from cp_shared_kv.testing.hostile_rank import CP_SIZE, PAGE_SIZE, POOL, VOCAB_SIZE
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.sampling_params import SamplingParams


def hostile_run_spec(
    physical_pages: int, decode_pages: int, chunk_tokens: int, *, eos: int, verify: bool
) -> RunSpec:
    """One group of CP_SIZE ranks and one decode worker, of a model that nobody runs."""
    config = EngineConfig(
        model_path=Path("/models/tiny"),
        page_size=PAGE_SIZE,
        chunked_prefill_size=chunk_tokens,
        attention_context_parallel_size=CP_SIZE,
        enable_nsa_prefill_context_parallel=True,
        enable_nsa_prefill_cp_shared_kv=True,
        verify_kv_transfer=verify,
    )
    return RunSpec(
        run_id="hostile",
        run_dir="/nowhere",
        supervisor_pid=1,
        config=config.as_plain(),
        limits=EngineLimits(
            page_size=PAGE_SIZE,
            cp_size=CP_SIZE,
            shared=True,
            physical_tokens_per_rank=physical_pages * PAGE_SIZE,
            decode_tokens=decode_pages * PAGE_SIZE,
            context_length=1000,
            scratch_limit_bytes=0,
            max_prefix_pages=3,
            pool_bytes_per_rank=0,
            decode_pool_bytes=0,
        ),
        page_layout=PageLayout(
            latent_format="l",
            index_format="i",
            num_layers=1,
            index_layers=(),
            bytes_per_page=POOL.bytes_per_page,
        ),
        model_fingerprint="m",
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(eos,),
    )


def random_request(chance: random.Random, room: int, decode: str) -> Submit:
    """A short prompt, often with a beginning that others share, and some sampling."""
    prompt = [1] * chance.choice((0, 0, 8))
    prompt += [chance.randint(0, 3) for _ in range(chance.randint(1, 12))]
    return Submit(
        room=room,
        decode=decode,
        token_ids=pack_int64(np.array(prompt, np.int64)),
        max_tokens=chance.randint(1, 6),
        sampling=SamplingParams(
            ignore_eos=chance.random() < 0.5,
            repetition_penalty=chance.choice((1.0, 1.1)),
            stop_token_ids=chance.choice(((), (12,))),
            logit_bias=chance.choice(((), ((3, 1.0),))),
        ),
    )

"""Sizes and requests of a group that is tested without processes."""

from __future__ import annotations

import random

import numpy as np

from cp_shared_kv.engine.messages import Submit
from cp_shared_kv.engine.run_spec import RunSpec
from cp_shared_kv.testing.bare_run_spec import bare_run_spec
from cp_shared_kv.testing.hostile_rank import CP_SIZE, PAGE_SIZE, POOL, VOCAB_SIZE
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.sampling_params import SamplingParams


def hostile_run_spec(
    physical_pages: int, decode_pages: int, chunk_tokens: int, *, eos: int, verify: bool
) -> RunSpec:
    """One group of CP_SIZE ranks and one decode worker."""
    return bare_run_spec(
        page_size=PAGE_SIZE,
        cp_size=CP_SIZE,
        chunk_tokens=chunk_tokens,
        physical_pages=physical_pages,
        decode_tokens=decode_pages * PAGE_SIZE,
        context_length=1000,
        max_prefix_pages=3,
        vocab_size=VOCAB_SIZE,
        eos_token_id=eos,
        bytes_per_page=POOL.bytes_per_page,
        verify_kv_transfer=verify,
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

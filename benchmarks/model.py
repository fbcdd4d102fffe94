"""The demo model on one core: the whole demo prompt in chunks, and decode steps behind it.

Samples are CPU seconds of this process, which runs one thread: the goals are in core-seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.micro.interleave import interleaved
from benchmarks.one_thread import one_thread
from cp_shared_kv.demo_model.cache import demo_checkpoint_directory
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.reads.group import SoloGroup
from cp_shared_kv.testing.model_on_ranks import ScheduleRun
from cp_shared_kv.testing.oracle_cases import prompt
from cp_shared_kv.testing.schedule import PlannedRequest, Schedule, Span, in_chunks

PROMPT_TOKENS = 11_358
CHUNK_TOKENS = 2048
PAGE_SIZE = 64
ROUNDS = 5
DECODE_STEPS = 20
REQUESTS = 4


@one_thread()
@torch.inference_mode()  # as the engine calls it
def run(progress: Progress) -> Measurement:
    """Time prefill and decode on the real pool of one rank, one thread."""
    transformer = Transformer.load(demo_checkpoint_directory())
    requests = [PlannedRequest(prompt(seed, PROMPT_TOKENS + 1)) for seed in range(REQUESTS)]
    chunks = [in_chunks(r, 0, (CHUNK_TOKENS,), PROMPT_TOKENS) for r in range(REQUESTS)]
    rank = ScheduleRun(transformer, SoloGroup(), Schedule(PAGE_SIZE, requests, []), "in-seq-split")
    for batch in [batch for batches in chunks[1:] for batch in batches]:
        rank.forward(batch)
    last = [Span(request, PROMPT_TOKENS, PROMPT_TOKENS + 1) for request in range(REQUESTS)]
    prefill = f"prefill {PROMPT_TOKENS} tokens"
    alone, together = "decode steps, 1 request", f"decode steps, {REQUESTS} requests"
    functions: dict[str, Callable[[], object]] = {
        prefill: partial(_forward_all, rank, chunks[0]),
        alone: partial(_decode, transformer, rank, last[:1]),
        together: partial(_decode, transformer, rank, last),
    }
    return Measurement(
        {
            "threads": 1,
            "page_size": PAGE_SIZE,
            "chunk_tokens": CHUNK_TOKENS,
            "decode_steps_a_sample": DECODE_STEPS,
            "context_tokens": PROMPT_TOKENS,
        },
        interleaved(functions, ROUNDS, progress, time.process_time),
        [
            # One second a thousand tokens, and 10 ms a request and step.
            Goal(prefill, PROMPT_TOKENS / 1000),
            Goal(alone, 0.010 * DECODE_STEPS),
            Goal(together, 0.010 * DECODE_STEPS * REQUESTS),
        ],
    )


def _forward_all(rank: ScheduleRun, batches: list[list[Span]]) -> None:
    for batch in batches:
        rank.forward(batch)


def _decode(transformer: Transformer, rank: ScheduleRun, batch: list[Span]) -> None:
    # The same step again and again: it writes the same KV to the same place.
    for _ in range(DECODE_STEPS):
        hidden, _rows = rank.forward(batch)
        transformer.logits(hidden).argmax(dim=1)


BENCHMARK = Benchmark("model", "prefill and decode of the demo model on one core", run)

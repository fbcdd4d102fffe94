"""The engine's model path on one core against transformers, same checkpoint, same work.

Ours runs as the engine runs it: batches through a real pool of one rank. transformers keeps its own
cache and computes the same chunks, then single decode steps behind them (sdpa attention, the faster
of the two it offers). Samples are CPU seconds of this process, which runs one thread.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch
import transformers

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.one_thread import one_thread
from cp_shared_kv.demo_model.cache import demo_checkpoint_directory
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.reads.group import SoloGroup
from cp_shared_kv.testing.model_on_ranks import ScheduleRun
from cp_shared_kv.testing.oracle_cases import prompt
from cp_shared_kv.testing.schedule import PlannedRequest, Schedule, Span, in_chunks

PROMPT_TOKENS = 4096
CHUNK_TOKENS = 512
DECODE_STEPS = 20
PAGE_SIZE = 64
ROUNDS = 5


@one_thread()
@torch.inference_mode()
def run(progress: Progress) -> Measurement:
    """Time both, in turn."""
    transformers.utils.logging.disable_progress_bar()
    checkpoint = demo_checkpoint_directory()
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    ours = Transformer.load(checkpoint)
    tokens = prompt(0, PROMPT_TOKENS + DECODE_STEPS)
    samples: dict[str, list[float]] = {
        f"{what}, {who}": []
        for what in ("prefill", "decode")
        for who in ("cp-shared-kv", "transformers")
    }
    for step in range(ROUNDS):
        for who, sides in (("cp-shared-kv", _ours), ("transformers", _theirs)):
            progress(who, step, ROUNDS)
            model = ours if who == "cp-shared-kv" else theirs
            prefill_seconds, decode_seconds = sides(model, tokens)
            samples[f"prefill, {who}"].append(prefill_seconds)
            samples[f"decode, {who}"].append(decode_seconds)
    progress("done", ROUNDS, ROUNDS)
    return Measurement(
        {
            "threads": 1,
            "model": "demo checkpoint, fp32",
            "prompt_tokens": PROMPT_TOKENS,
            "chunk_tokens": CHUNK_TOKENS,
            "decode_steps": DECODE_STEPS,
            "transformers": transformers.__version__,
        },
        samples,
        [
            # The goal is twice the tokens per second: half of the time.
            Goal("prefill, cp-shared-kv", 0.5, "prefill, transformers"),
            Goal("decode, cp-shared-kv", 0.5, "decode, transformers"),
        ],
    )


def _ours(transformer: Transformer, tokens: list[int]) -> tuple[float, float]:
    requests = [PlannedRequest(tokens)]
    rank = ScheduleRun(transformer, SoloGroup(), Schedule(PAGE_SIZE, requests, []), "in-seq-split")
    started = time.process_time()
    for batch in in_chunks(0, 0, (CHUNK_TOKENS,), PROMPT_TOKENS):
        rank.forward(batch)
    prefilled = time.process_time()
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + DECODE_STEPS):
        hidden, _rows = rank.forward([Span(0, position, position + 1)])
        transformer.logits(hidden).argmax(dim=1)
    return prefilled - started, time.process_time() - prefilled


def _theirs(model: Any, tokens: list[int]) -> tuple[float, float]:
    # The cache's keyword changed its name between the releases that are supported.
    known = inspect.signature(model.forward).parameters
    name = "past_key_values" if "past_key_values" in known else "cache"
    ids = torch.tensor([tokens])
    cache: Any = None

    def forward(first: int, last: int) -> torch.Tensor:
        nonlocal cache
        keywords = {name: cache} if cache is not None else {}
        # Logits of the last row alone, as a server asks for them.
        answer = model(input_ids=ids[:, first:last], use_cache=True, logits_to_keep=1, **keywords)
        cache = getattr(answer, name)
        return answer.logits

    started = time.process_time()
    for first in range(0, PROMPT_TOKENS, CHUNK_TOKENS):
        forward(first, first + CHUNK_TOKENS)
    prefilled = time.process_time()
    for position in range(PROMPT_TOKENS, PROMPT_TOKENS + DECODE_STEPS):
        forward(position, position + 1).argmax(dim=-1)
    return prefilled - started, time.process_time() - prefilled


BENCHMARK = Benchmark(
    "model_against_transformers", "prefill and decode on one core, against transformers", run
)

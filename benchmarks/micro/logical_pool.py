"""Real agentic coding sessions replayed through LogicalPool in a pool that is always full.

`CPKV_AGENTIC_TRACE` names the trace, one conversation a line: {"reqs": [[seconds, prompt tokens,
output tokens, [[first block id, blocks], ...], is_subagent, api seconds, think seconds], ...]},
blocks of 64 tokens with ids of their own in each conversation. Where it is not set, this
benchmark is not listed. One thread; times are CPU seconds of this process, since the pool does
nothing but compute. Making the page keys is included.
"""

from __future__ import annotations

import heapq
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import Benchmark, Goal, Measurement, Progress
from cp_shared_kv import CpSharedKVLayout, KVCapacity
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.allocator import PageAllocator
from cp_shared_kv.memory.logical_pool import Admission, LogicalPool

TRACE_VARIABLE = "CPKV_AGENTIC_TRACE"
CAPACITY = KVCapacity.from_tokens(237_312, page_size=64, cp_size=8)
USERS = 16
REQUESTS = 20_000
ROUNDS = 5
SEED = 0
LONGEST_THINK_SECONDS = 60.0
# A room is released after so many later admissions: its transfer outlasts them.
ROOMS_IN_TRANSFER = 2
LONG_REQUEST_PAGES = 1_000
DRAWS = 200
DRAWN_PAGES = 2_000

REPLAY = f"replay {REQUESTS:,} requests"
DRAW = f"draw {DRAWN_PAGES:,} pages"
FREE = f"free {DRAWN_PAGES:,} pages"


class TraceRequest(NamedTuple):
    conversation: int
    prompt_tokens: int
    block_runs: list[tuple[int, int]]  # (first block id, blocks)
    answer_seconds: float
    think_seconds: float  # before the request


@dataclass(slots=True)
class Replay:
    """What one replay counted, in pages unless named otherwise."""

    prompt: int = 0
    hit: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    waits: int = 0


def read_trace(path: Path) -> list[list[TraceRequest]]:
    """The requests of each conversation in the trace."""
    with path.open() as lines:
        return [
            [
                TraceRequest(number, tokens, runs, answer or 0.0, think or 0.0)
                for _, tokens, _, runs, _, answer, think in json.loads(line)["reqs"]
            ]
            for number, line in enumerate(lines)
        ]


def closed_loop(conversations: list[list[TraceRequest]]) -> Iterator[TraceRequest]:
    """All requests in the order in which USERS users send them who wait for each answer.

    A user holds one conversation after the other, dealt in random order; between two requests
    pass the recorded answer time and the recorded thinking time up to a limit.
    """
    random = np.random.default_rng(SEED)
    deck = cycle([conversations[number] for number in random.permutation(len(conversations))])
    turns: list[tuple[float, int, list[TraceRequest]]] = [
        (random.uniform(0, LONGEST_THINK_SECONDS), user, next(deck)) for user in range(USERS)
    ]
    heapq.heapify(turns)
    while True:
        now, user, (request, *later) = heapq.heappop(turns)
        yield request
        thinks = min(later[0].think_seconds if later else np.inf, LONGEST_THINK_SECONDS)
        heapq.heappush(turns, (now + request.answer_seconds + thinks, user, later or next(deck)))


def replay(requests: list[TraceRequest], see: Callable[[Admission], None] | None = None) -> Replay:
    """Run all requests through a new pool, in order."""
    pool, counts, page_size = LogicalPool(CAPACITY), Replay(), CAPACITY.page_size
    for room, request in enumerate(requests):
        keys, tokens = _block_keys(request), request.prompt_tokens
        page_count = -(-tokens // page_size)
        # One token at least is computed, so the block that ends the prompt is not asked for.
        usable = keys[: (tokens - 1) // page_size]
        while (admission := pool.admit(room, usable, page_count)) is None:
            counts.waits += 1
            pool.release(next(iter(pool.rooms)))
        pool.publish(room, keys)
        if len(pool.rooms) > ROOMS_IN_TRANSFER:
            pool.release(next(iter(pool.rooms)))
        counts.prompt += page_count
        counts.hit += admission.cached_pages
        counts.prompt_tokens += tokens
        counts.hit_tokens += admission.cached_pages * page_size
        if see is not None:
            see(admission)
    pool.check_invariants()
    return counts


def run(progress: Progress) -> Measurement:
    """One replay that looks at the balance of owners, then ROUNDS that are timed."""
    conversations = read_trace(Path(os.environ[TRACE_VARIABLE]))
    requests = list(islice(closed_loop(conversations), REQUESTS))
    steps = ROUNDS + 2
    progress("balance", 0, steps)
    owners: list[npt.NDArray[np.int64]] = []
    layout = CpSharedKVLayout(CAPACITY.page_size, CAPACITY.cp_size, 0)

    def count_owners(admission: Admission) -> None:
        owner = layout.owner_for_logical_pages(admission.logical_pages)
        owners.append(np.bincount(owner, minlength=CAPACITY.cp_size))

    counts = replay(requests, count_owners)
    progress("draw and free", 1, steps)
    samples = _time_draws()
    samples[REPLAY] = []
    for step in range(ROUNDS):
        progress("replay", step + 2, steps)
        started = time.process_time()
        replay(requests)
        samples[REPLAY].append(time.process_time() - started)
    progress("done", steps, steps)
    config: dict[str, object] = {
        "users": USERS,
        "requests": REQUESTS,
        "seed": SEED,
        "longest_think_seconds": LONGEST_THINK_SECONDS,
        "rooms_in_transfer": ROOMS_IN_TRANSFER,
        "physical_tokens_per_rank": CAPACITY.physical_tokens,
        "logical_tokens": CAPACITY.logical_tokens,
        "cp_size": CAPACITY.cp_size,
        "stripe_pages": CAPACITY.stripe_pages,
        "clock": "CPU seconds of one thread",
        "found": {
            "mean_request_pages": counts.prompt / REQUESTS,
            "hit_rate_of_tokens": counts.hit_tokens / counts.prompt_tokens,
            "hit_rate_of_pages": counts.hit / counts.prompt,
            "admissions_that_waited": counts.waits,
            "busiest_owner_over_ideal": balance(np.array(owners)),
        },
    }
    goals = [Goal(REPLAY, 60.0), Goal(DRAW, 0.001), Goal(FREE, 0.001)]
    return Measurement(config, samples, goals)


def balance(owners: npt.NDArray[np.int64]) -> dict[str, dict[str, float]]:
    """The busiest owner's pages over ideal (pages / N), for i64[requests, N] pages by owner.

    A request whose pages are no multiple of N cannot reach 1; `least_possible` is that bound.
    """
    pages = owners.sum(axis=1)
    groups = {"all": pages > 0, f"from {LONG_REQUEST_PAGES:,} pages": pages >= LONG_REQUEST_PAGES}
    found: dict[str, dict[str, float]] = {}
    for name, chosen in groups.items():
        ideal = pages[chosen] / owners.shape[1]
        reached, least = owners[chosen].max(axis=1) / ideal, np.ceil(ideal) / ideal
        found[name] = {"requests": int(chosen.sum()), "mean": float(reached.mean())}
        for quantile in (50, 99, 100):
            label = "max" if quantile == 100 else f"p{quantile}"
            found[name][label] = float(np.percentile(reached, quantile))
            found[name][f"least_possible_{label}"] = float(np.percentile(least, quantile))
    return found


def _time_draws() -> dict[str, list[float]]:
    """Draw and free in a pool of which a third is free, scattered as churn leaves it."""
    allocator = PageAllocator(CAPACITY)
    everything = allocator.draw(allocator.total_pages)
    scattered = np.random.default_rng(SEED).permutation(everything)[: len(everything) // 3]
    allocator.free(LogicalPages(scattered))
    samples: dict[str, list[float]] = {DRAW: [], FREE: []}
    for _ in range(DRAWS):
        started = time.perf_counter()
        pages = allocator.draw(DRAWN_PAGES)
        drawn = time.perf_counter()
        allocator.free(pages)
        samples[DRAW].append(drawn - started)
        samples[FREE].append(time.perf_counter() - drawn)
    return samples


def _block_keys(request: TraceRequest) -> npt.NDArray[np.int64]:
    """Block ids are counted in each conversation anew: the conversation makes them unique."""
    base = request.conversation << 32
    runs = [np.arange(base + first, base + first + count) for first, count in request.block_runs]
    return np.concatenate(runs) if runs else np.empty(0, np.int64)


if TRACE_VARIABLE in os.environ:
    BENCHMARK = Benchmark(
        "logical_pool", "20,000 agentic requests through the allocator and the radix cache", run
    )

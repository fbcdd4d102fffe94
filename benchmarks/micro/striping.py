"""How many descriptors a transfer takes, with striped destinations and without.

A request's pages lie with their owners as prefill's allocator deals them, and at decode where its
free list has room. Without striping, position i gets the i-th page that decode has drawn; with it,
`stripe_destinations` decides. Each rank merges what it sends of each chunk. Counted are the
descriptors of all ranks for one layer and kind of page; the demo model has 4 of these. There is
nothing random in a fresh pool; the others are of several seeds. Counts and no times: "counts" in
the result's config.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import Benchmark, Measurement, Progress
from cp_shared_kv import CpSharedKVLayout, KVCapacity
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages, Positions
from cp_shared_kv.memory.allocator import PageAllocator
from cp_shared_kv.transfer.descriptors import merge_pages, stripe_destinations

PAGE_SIZE = 64
CP_SIZES = (2, 4, 8)
SEEDS = range(5)
DEMO_PROMPT_TOKENS = (Path(__file__).parents[2] / "LICENSE").stat().st_size
"""The demo's prompt is this text, a token a byte."""
PROMPTS = (DEMO_PROMPT_TOKENS, 131_072)
CHUNK_TOKENS = 2048
POOL_PROMPTS = 4
"""Both pools hold so many prompts."""


@dataclass(frozen=True)
class Count:
    """Descriptors for one layer and kind, of all ranks together, by seed."""

    prompt_tokens: int
    pages: int
    cp_size: int
    pools: str
    chunk_tokens: int | None
    """None: the prompt is one chunk."""
    in_order: list[int]
    striped: list[int]

    def summary(self) -> dict[str, Any]:
        """The fields, the medians, and how many times fewer."""
        in_order, striped = statistics.median(self.in_order), statistics.median(self.striped)
        return asdict(self) | {
            "median_in_order": in_order,
            "median_striped": striped,
            "in_order_over_striped": round(in_order / striped, 2),
        }


def fresh(_pool: PageAllocator, _request_pages: int, _random: np.random.Generator) -> None:
    """Every page is free."""


def half_of_the_requests(
    pool: PageAllocator, request_pages: int, random: np.random.Generator
) -> None:
    """Full of requests of many sizes; then half of them end, in any order."""
    requests: list[LogicalPages] = []
    while pool.available_pages:
        wanted = int(random.integers(1, request_pages // 2))
        requests.append(pool.draw(min(wanted, pool.available_pages)))
    for number in random.permutation(len(requests)):
        if pool.available_pages < pool.total_pages // 2:
            pool.free(requests[number])


def half_of_the_pages(
    pool: PageAllocator, _request_pages: int, random: np.random.Generator
) -> None:
    """Half of the pages are free, each by the toss of a coin: worse than use leaves it."""
    everything = pool.draw(pool.total_pages)
    pool.free(LogicalPages(random.permutation(everything)[: len(everything) // 2]))


POOLS: dict[str, Callable[[PageAllocator, int, np.random.Generator], None]] = {
    "fresh": fresh,
    "half of the requests freed": half_of_the_requests,
    "half of the pages freed": half_of_the_pages,
}


def run(progress: Progress) -> Measurement:
    """Count every setting."""
    total = len(PROMPTS) * len(CP_SIZES) * len(POOLS)
    counts: list[dict[str, Any]] = []
    for done, (prompt_tokens, cp_size, pools) in enumerate(settings()):
        progress(f"N={cp_size}, {pools}", done, total)
        counts += [
            count(prompt_tokens, cp_size, pools, chunk_tokens).summary()
            for chunk_tokens in (CHUNK_TOKENS, None)
        ]
    progress("done", total, total)
    config: dict[str, object] = {
        "page_size": PAGE_SIZE,
        "pool_prompts": POOL_PROMPTS,
        "seeds": len(SEEDS),
        "counts": counts,
    }
    return Measurement(config, {})


def settings() -> Iterator[tuple[int, int, str]]:
    """Prompt tokens, ranks, and the state of both pools."""
    for prompt_tokens in PROMPTS:
        for cp_size in CP_SIZES:
            for pools in POOLS:
                yield prompt_tokens, cp_size, pools


def count(prompt_tokens: int, cp_size: int, pools: str, chunk_tokens: int | None) -> Count:
    """Draw one request in both pools and merge its pages both ways, for every seed."""
    pages = -(-prompt_tokens // PAGE_SIZE)
    chunk_pages = pages if chunk_tokens is None else chunk_tokens // PAGE_SIZE
    in_order: list[int] = []
    striped: list[int] = []
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        prefill, decode = (_capacity(pages, owners) for owners in (cp_size, 1))
        logical_pages = _draw(prefill, pages, pools, random)
        destinations = PhysicalPages(_draw(decode, pages, pools, random))
        in_order.append(_descriptors(prefill, logical_pages, destinations, chunk_pages))
        destinations = stripe_destinations(destinations, 0, cp_size)
        striped.append(_descriptors(prefill, logical_pages, destinations, chunk_pages))
    return Count(prompt_tokens, pages, cp_size, pools, chunk_tokens, in_order, striped)


def _capacity(pages: int, owners: int) -> KVCapacity:
    tokens_per_owner = -(-POOL_PROMPTS * pages // owners) * PAGE_SIZE
    return KVCapacity.from_tokens(tokens_per_owner, PAGE_SIZE, owners)


def _draw(
    capacity: KVCapacity, pages: int, pools: str, random: np.random.Generator
) -> LogicalPages:
    allocator = PageAllocator(capacity)
    POOLS[pools](allocator, pages, random)
    return allocator.draw(pages)


def _descriptors(
    capacity: KVCapacity,
    logical_pages: LogicalPages,
    destinations: PhysicalPages,
    chunk_pages: int,
) -> int:
    """Of all ranks and chunks: each rank sends its own pages of a chunk."""
    positions = Positions(np.arange(len(logical_pages)))
    total = 0
    for rank in range(capacity.cp_size):
        layout = CpSharedKVLayout(
            PAGE_SIZE, capacity.cp_size, rank, physical_pages=capacity.physical_pages
        )
        source, mine = layout.filter_owned_pages(logical_pages, positions)
        for chunk in range(0, len(positions), chunk_pages):
            sent = (mine >= chunk) & (mine < chunk + chunk_pages)
            to = PhysicalPages(destinations[mine[sent]])
            total += merge_pages(PhysicalPages(source[sent]), to).count
    return total


BENCHMARK = Benchmark(
    "striping", "descriptors of a transfer with striped destinations and without", run
)

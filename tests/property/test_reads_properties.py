"""Any batches over any pool, on ranks that are threads: each read gives the bytes once written."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_shared_kv.testing.rank_process import load

RANKS_FILE = Path(__file__).parents[1] / "ranks" / "kv_ranks.py"
PAGES_PER_RANK = 12


class ThreadGroup:
    """A CP group whose ranks are threads of one process."""

    def __init__(self, cp_rank: int, barrier: threading.Barrier, sent: list[torch.Tensor]) -> None:
        self.cp_rank = cp_rank
        self.cp_size = barrier.parties
        self._barrier = barrier
        self._sent = sent

    def all_gather_bytes(self, local: torch.Tensor, out: torch.Tensor) -> None:
        self._sent[self.cp_rank] = local
        self.barrier()
        for row, its in zip(out, self._sent, strict=True):
            row.copy_(its)
        self.barrier()

    def barrier(self) -> None:
        self._barrier.wait(timeout=60)


def on_ranks(cp_size: int, function: Callable[[ThreadGroup], None]) -> None:
    barrier, sent = threading.Barrier(cp_size), [torch.empty(0)] * cp_size

    def run(rank: int) -> None:
        try:
            function(ThreadGroup(rank, barrier, sent))
        except BaseException:
            barrier.abort()  # else the others would wait for this one
            raise

    with ThreadPoolExecutor(cp_size) as ranks:
        futures = [ranks.submit(run, rank) for rank in range(cp_size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in causes or errors:
        raise error


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, dict[str, Any], list[list[dict[str, Any]]]]:
    """The size of a group, the shape of its pools, and batches as a scheduler could send them."""
    cp_size = draw(st.integers(1, 5))
    page_size = draw(st.integers(1, 4))
    stripe_pages = draw(st.sampled_from([1, 2, 3]))
    free = draw(st.permutations(range(1, cp_size * PAGES_PER_RANK + 1)))
    requests: list[tuple[list[int], int]] = []
    batches: list[list[dict[str, Any]]] = []
    for _ in range(draw(st.integers(1, 4))):
        batch: list[dict[str, Any]] = []
        ready = list(requests)
        for number in draw(st.lists(st.integers(0, len(ready) + 2), max_size=4, unique=True)):
            pages, prefix_len = ready[number] if number < len(ready) else ([], 0)
            fork = number < len(ready) and draw(st.booleans())
            if fork:  # a new request on complete pages of this one
                shared = draw(st.integers(0, prefix_len // page_size))
                pages, prefix_len = pages[:shared], shared * page_size
            room = (len(pages) + len(free)) * page_size - prefix_len
            new_len = draw(st.integers(0, min(room, 3 * page_size)))
            missing = -(-(prefix_len + new_len) // page_size) - len(pages)
            pages, free = [*pages, *free[:missing]], free[missing:]
            batch.append({"pages": pages, "prefix_len": prefix_len, "new_len": new_len})
            if fork or number >= len(ready):
                requests.append((pages, prefix_len + new_len))
            else:
                requests[number] = (pages, prefix_len + new_len)
        batches.append(batch)
    shape = {
        "page_size": page_size,
        "stripe_pages": stripe_pages,
        "physical_pages": PAGES_PER_RANK,
        "split": draw(st.sampled_from(["in-seq-split", "round-robin-split"])),
        "index_sections": draw(st.sampled_from([(12,), (8, 4), (5, 7)])),
    }
    return cp_size, shape, batches


@settings(max_examples=40, deadline=None)
@given(stories())
def test_every_read_of_any_story_gives_the_bytes_once_written(
    story: tuple[int, dict[str, Any], list[list[dict[str, Any]]]],
) -> None:
    cp_size, shape, batches = story
    run_story = load(f"{RANKS_FILE}:run_story")
    named = {**shape, "name": f"cpkv-test-{uuid.uuid4().hex}"}
    on_ranks(cp_size, lambda group: run_story(group, named, batches))

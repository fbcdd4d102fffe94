"""Pull, full view and the replicated pool give the same bytes, and they are those once written."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from cp_shared_kv.reads.full_view import PAGES_PER_ROUND
from cp_shared_kv.testing.rank_pool import RankPool

pytestmark = pytest.mark.ranks

RANKS_FILE = Path(__file__).with_name("kv_ranks.py")
PHYSICAL_PAGES = 24
SPLITS = ["in-seq-split", "round-robin-split"]
FORMATS = [["fp32", "fp32"], ["bf16", "bf16"], ["bf16", "fp8_scaled"], ["fp8_ds_mla", "fp8_scaled"]]
# Page size, stripe pages, bytes of an index key in each section of a page.
SHAPES = [(4, 1, [12]), (3, 2, [8, 4]), (1, 1, [12]), (64, 4, [9, 2, 1])]


class Story:
    """Batches of requests over pages in shuffled order, as a scheduler could send them."""

    def __init__(self, page_size: int, free: npt.NDArray[np.int64]) -> None:
        self.page_size = page_size
        self.free = free
        self.requests: dict[str, tuple[list[int], int]] = {}

    def span(self, request: str, new_len: int) -> dict[str, Any]:
        """The request's next chunk."""
        pages, prefix_len = self.requests.get(request, ([], 0))
        needed = -(-(prefix_len + new_len) // self.page_size) - len(pages)
        drawn, self.free = self.free[:needed], self.free[needed:]
        assert len(drawn) == needed
        pages = [*pages, *drawn.tolist()]
        self.requests[request] = (pages, prefix_len + new_len)
        return {"pages": pages, "prefix_len": prefix_len, "new_len": new_len}

    def fork(self, parent: str, request: str, pages: int) -> None:
        """Start a request on the parent's first pages, complete ones."""
        assert pages * self.page_size <= self.requests[parent][1]
        self.requests[request] = (self.requests[parent][0][:pages], pages * self.page_size)

    def evict(self, request: str) -> None:
        """Its pages are the next to be drawn."""
        pages, _ = self.requests.pop(request)
        self.free = np.append(np.array(pages, np.int64), self.free)


def shuffled(logical_pages: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).permutation(logical_pages) + 1


def long_story(page_size: int, free: npt.NDArray[np.int64]) -> list[list[dict[str, Any]]]:
    story = Story(page_size, free)
    span = story.span
    batches = [
        [span("a", 2 * page_size + page_size // 2)],  # nothing cached, ends inside a page
        [span("a", 1), span("b", 1)],  # on into the boundary page; a prefix beside none
    ]
    story.fork("a", "c", pages=2)
    story.fork("a", "d", pages=1)
    # Three prefixes that share pages; one of them goes on past its boundary page.
    batches.append([span("c", 3), span("a", page_size), span("d", page_size + 1)])
    batches.append([span("b", 1)])  # fewer tokens than ranks
    batches.append([span("c", 0), span("d", 2)])  # a request that computes nothing
    batches.append([span("d", 0)])  # a batch that computes nothing
    story.evict("b")
    batches.append([span("e", page_size + 1), span("d", 1)])  # over what another has left
    batches.append([span("e", 2), span("c", 2 * page_size)])
    return batches


class MakeShape(Protocol):
    def __call__(self, split: str, page_size: int, **others: object) -> dict[str, object]: ...


@pytest.fixture
def make_shape() -> Iterator[MakeShape]:
    """The shape of a test's pools; their segments are gone after it even if a rank was killed."""
    name = f"cpkv-test-{uuid.uuid4().hex}"

    def make(split: str, page_size: int, **others: object) -> dict[str, object]:
        defaults = {
            "stripe_pages": 1,
            "physical_pages": PHYSICAL_PAGES,
            "index_sections": [12],
        }
        return {"name": name, "split": split, "page_size": page_size, **defaults, **others}

    yield make
    for segment in Path("/dev/shm").glob(f"{name}-*"):
        segment.unlink()


@pytest.mark.parametrize(("page_size", "stripe_pages", "index_sections"), SHAPES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_read_gives_the_bytes_once_written(
    rank_pool: RankPool,
    make_shape: MakeShape,
    cp_size: int,
    split: str,
    page_size: int,
    stripe_pages: int,
    index_sections: list[int],
) -> None:
    story = long_story(page_size, shuffled(cp_size * PHYSICAL_PAGES, seed=cp_size))
    results = rank_pool.run(
        f"{RANKS_FILE}:check_story",
        size=cp_size,
        shape=make_shape(
            split, page_size, stripe_pages=stripe_pages, index_sections=index_sections
        ),
        story=story,
    )
    computed = sum(result["tokens"] for result in results)
    assert computed == sum(span["new_len"] for batch in story for span in batch)
    assert all(result["rows"] > 0 for result in results)


@pytest.mark.parametrize("formats", FORMATS, ids="+".join)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("cp_size", "page_size", "stripe_pages"), [(2, 64, 1), (4, 3, 2)])
def test_every_format_is_staged_stored_and_read_as_the_bytes_once_encoded(
    rank_pool: RankPool,
    make_shape: MakeShape,
    cp_size: int,
    split: str,
    page_size: int,
    stripe_pages: int,
    formats: list[str],
) -> None:
    results = rank_pool.run(
        f"{RANKS_FILE}:check_story",
        size=cp_size,
        shape=make_shape(split, page_size, stripe_pages=stripe_pages, formats=formats),
        story=long_story(page_size, shuffled(cp_size * PHYSICAL_PAGES, seed=cp_size)),
    )
    assert all(result["rows"] > 0 for result in results)


def test_pull_reads_right_when_ranks_overtake_each_other(
    rank_pool: RankPool, make_shape: MakeShape
) -> None:
    story = Story(4, shuffled(4 * PHYSICAL_PAGES, seed=3))
    batches: list[list[dict[str, Any]]] = []
    for turn in range(8):  # each over the pages that the one before has left
        batches.append([story.span(f"turn {turn}", 25)])
        # Nothing is computed, so nothing is exchanged: only the reader's barrier is left to wait
        # for a peer that has not yet written the last layer.
        batches.append([story.span(f"turn {turn}", 0)])
        story.evict(f"turn {turn}")
    rank_pool.run(
        f"{RANKS_FILE}:check_out_of_step",
        shape=make_shape("round-robin-split", page_size=4),
        story=batches,
    )


@pytest.mark.parametrize("split", SPLITS)
def test_pages_of_one_owner_alone_are_read_in_several_rounds(
    rank_pool: RankPool, make_shape: MakeShape, split: str
) -> None:
    physical_pages = 2 * PAGES_PER_ROUND + 3
    by_owner = np.arange(4 * physical_pages).reshape(-1, 4).T.reshape(-1) + 1
    story = Story(2, by_owner)
    batches = [
        [story.span("a", 4 * PAGES_PER_ROUND + 5)],  # more than two rounds, all of rank 0
        [story.span("a", 3)],
        [story.span("a", 2 * physical_pages)],  # on into the pages of rank 1
        [story.span("a", 1)],
    ]
    rank_pool.run(
        f"{RANKS_FILE}:check_story",
        shape=make_shape(split, page_size=2, physical_pages=physical_pages),
        story=batches,
    )


@pytest.mark.parametrize("kind", ["latent", "index"])
@pytest.mark.parametrize("mode", ["pull", "sparse", "blocks", "full_view", "replicated"])
def test_one_wrong_byte_in_a_page_is_seen(
    rank_pool: RankPool, make_shape: MakeShape, mode: str, kind: str
) -> None:
    story = Story(4, shuffled(4 * PHYSICAL_PAGES, seed=5))
    batches = [[story.span("a", 10)], [story.span("a", 7)]]
    notices = rank_pool.run(
        f"{RANKS_FILE}:check_wrong_byte",
        shape=make_shape("round-robin-split", page_size=4),
        story=batches,
        mode=mode,
        kind=kind,
        logical_page=batches[0][0]["pages"][1],
    )
    # The page holds tokens 4 to 7 of the request; byte 5 of it is in its first token.
    for notice in notices:
        where = f"{mode}: {kind} of layer 0, request 0: first difference at index (4, 5): 0x"
        assert where in notice
        assert "(1 elements differ)" in notice

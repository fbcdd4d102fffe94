"""What striped destinations save over Mooncake: one rank's part of a prompt, loopback TCP.

A rank owns every Nth page, so its pages are adjacent at their source and N apart in the order of
the prompt. Striped, they are adjacent at decode too and merge; the peer sends one descriptor a page
and layer to the very same places. Both go through the same transport to a receiver in another
process. The prompt goes in chunks, one write each, as the engine sends it. Descriptors are counted
in the result's config; each goal for them stands there too.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np

from benchmarks import Benchmark, Goal, Measurement, Progress
from benchmarks.micro.interleave import interleaved
from benchmarks.micro.striping import PAGE_SIZE, POOL_PROMPTS, POOLS
from benchmarks.one_thread import one_thread
from cp_shared_kv import CpSharedKVLayout, KVCapacity
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages, Positions
from cp_shared_kv.memory.allocator import PageAllocator
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.memory.pool import KVPoolSpec
from cp_shared_kv.testing.transport_peer import TransportPeers
from cp_shared_kv.transfer.descriptors import (
    PageAreas,
    PageRuns,
    expand,
    merge_pages,
    stripe_destinations,
)
from cp_shared_kv.transfer.mooncake_transport import MooncakeTransport
from cp_shared_kv.transfer.transport import Runs

ROUNDS = 11
SEED = 0
CP_SIZE = 4
PROMPT_TOKENS, CHUNK_TOKENS = 32_768, 8192
LAYERS = 4
FEWER_DESCRIPTORS, FASTER = 8, 1.5
WRITE_SECONDS = 60.0
SPEC = KVPoolSpec(
    latent_format("fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=64, page_size=PAGE_SIZE),
    index_format("fp8_scaled", index_head_dim=128, page_size=PAGE_SIZE),
    LAYERS,
    tuple(range(LAYERS)),
)
MEASURED_POOLS = ("fresh", "half of the requests freed")
PARTS: dict[str, tuple[PageKind, ...]] = {
    "latent and index": ("latent", "index"),
    "latent": ("latent",),
    "index": ("index",),
}


@one_thread()
def run(progress: Progress) -> Measurement:
    """Send with both kinds of descriptors, whole pages and each kind of page alone."""
    with ExitStack() as stack:
        ends = _Ends(stack)
        functions: dict[str, Callable[[], object]] = {}
        goals: list[Goal] = []
        descriptors: dict[str, object] = {}
        for pools in MEASURED_POOLS:
            chunks = _chunks(pools)
            for part, kinds in PARTS.items():
                case = f"{pools}, {part}"
                striped = [ends.runs(merge_pages(*chunk), kinds) for chunk in chunks]
                single = [ends.runs(_one_a_page(*chunk), kinds) for chunk in chunks]
                counts = [sum(runs.count for runs in way) for way in (striped, single)]
                descriptors[case] = {
                    "striped": counts[0],
                    "one a page": counts[1],
                    "times fewer": counts[1] / counts[0],
                    "at_least": FEWER_DESCRIPTORS,
                    "met": counts[1] >= FEWER_DESCRIPTORS * counts[0],
                    "bytes": sum(runs.total_bytes for runs in striped),
                }
                functions[f"{case}: striped"] = partial(ends.send, striped)
                functions[f"{case}: one a page"] = partial(ends.send, single)
                goals.append(Goal(f"{case}: striped", 1 / FASTER, against=f"{case}: one a page"))
        samples = interleaved(functions, ROUNDS, progress)
        ends.check_pages(chunks)
        config: dict[str, object] = {
            "rounds": ROUNDS,
            "seed": SEED,
            "cp_size": CP_SIZE,
            "prompt_tokens": PROMPT_TOKENS,
            "chunk_tokens": CHUNK_TOKENS,
            "layers": LAYERS,
            "page_bytes": {kind: SPEC.page_bytes(kind) for kind in PARTS["latent and index"]},
            "descriptors": descriptors,
        }
        return Measurement(config, samples, goals)


class _Ends:
    """Rank 0's pool with random bytes in this process, and decode's in another."""

    def __init__(self, stack: ExitStack) -> None:
        self._prefill, self._decode = (_capacity(owners) for owners in (CP_SIZE, 1))
        self._areas = PageAreas.between(
            SPEC, self._prefill.physical_pages, self._decode.physical_pages
        )
        peers = stack.enter_context(TransportPeers())
        self._peer = peers.start("mooncake", SPEC.pool_bytes(self._decode.physical_pages))
        buffer = PrivateBuffer(SPEC.pool_bytes(self._prefill.physical_pages))
        self._source = buffer.tensor.numpy()
        random = np.random.default_rng(SEED)
        self._source[:] = random.integers(1, 256, buffer.nbytes, dtype=np.uint8)
        self._transport = MooncakeTransport("bench-sender")
        stack.callback(self._transport.close)
        self._local = self._transport.register(buffer)
        self._transport.connect(self._peer.info)

    def runs(self, pages: PageRuns, kinds: tuple[PageKind, ...]) -> Runs:
        """Byte ranges of the page runs in every layer of these kinds; none of them merged."""
        areas = self._areas
        first = 0 if "latent" in kinds else LAYERS
        wanted = slice(first, first + LAYERS * len(kinds))
        part = PageAreas(
            areas.local_base_bytes[wanted],
            areas.remote_base_bytes[wanted],
            areas.page_bytes[wanted],
            areas.local_physical_pages,
            areas.remote_physical_pages,
        )
        return expand(pages, part, local_region=self._local.name, remote_region=self._peer.region)

    def send(self, chunks: list[Runs]) -> None:
        """One write a chunk, one after the other."""
        for runs in chunks:
            self._transport.write(self._peer.info.session_id, runs).result(WRITE_SECONDS)

    def check_pages(self, chunks: list[tuple[PhysicalPages, PhysicalPages]]) -> None:
        """What was sent last is what lies there."""
        for chunk in chunks:
            runs = self.runs(merge_pages(*chunk), PARTS["latent and index"])
            for start, to, nbytes in zip(
                runs.local_offset_bytes, runs.remote_offset_bytes, runs.nbytes, strict=True
            ):
                np.testing.assert_array_equal(
                    self._peer.memory[to : to + nbytes], self._source[start : start + nbytes]
                )


def _chunks(pools: str) -> list[tuple[PhysicalPages, PhysicalPages]]:
    """Rank 0's pages of each chunk and where they go, striped."""
    random = np.random.default_rng(SEED)
    prefill, decode = (_capacity(owners) for owners in (CP_SIZE, 1))
    logical_pages = _draw(prefill, pools, random)
    destinations = stripe_destinations(PhysicalPages(_draw(decode, pools, random)), 0, CP_SIZE)
    layout = CpSharedKVLayout(PAGE_SIZE, CP_SIZE, 0, physical_pages=prefill.physical_pages)
    chunk_pages = CHUNK_TOKENS // PAGE_SIZE
    chunks: list[tuple[PhysicalPages, PhysicalPages]] = []
    for start in range(0, len(logical_pages), chunk_pages):
        positions = Positions(np.arange(start, start + chunk_pages, dtype=np.int64))
        source, mine = layout.filter_owned_pages(
            LogicalPages(logical_pages[start : start + chunk_pages]), positions
        )
        chunks.append((source, PhysicalPages(destinations[mine])))
    return chunks


def _one_a_page(source: PhysicalPages, destination: PhysicalPages) -> PageRuns:
    return PageRuns(source, destination, np.ones(len(source), dtype=np.int64))


def _capacity(owners: int) -> KVCapacity:
    tokens_per_owner = POOL_PROMPTS * PROMPT_TOKENS // owners
    return KVCapacity.from_tokens(tokens_per_owner, PAGE_SIZE, owners)


def _draw(capacity: KVCapacity, pools: str, random: np.random.Generator) -> LogicalPages:
    pages = PROMPT_TOKENS // PAGE_SIZE
    allocator = PageAllocator(capacity)
    POOLS[pools](allocator, pages, random)
    return allocator.draw(pages)


BENCHMARK = Benchmark(
    "mooncake_striping", "a rank's pages over Mooncake: merged, and a descriptor each", run
)

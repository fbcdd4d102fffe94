"""What --verify-kv-transfer costs: a page's checksum, against sending it through shared memory.

Both ends make it once a page, so the cost of a transfer is twice the figure. Pages of four layers
at DeepSeek-V3.2's widths (latent KV as fp8_ds_mla, index K as fp8_scaled), in shuffled order, in
pools too large for a cache. One thread.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import numpy as np

from benchmarks import Benchmark, Measurement, Progress
from benchmarks.micro.interleave import interleaved
from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.memory.buffers import SharedMemoryBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_checksums import page_checksums
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.transfer.descriptors import PageAreas, expand, merge_pages
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.shared_memory import SharedMemoryTransport
from cp_shared_kv.transfer.transport import PeerInfo

ROUNDS = 11
SEED = 0
LAYERS = 4
PAGES = 400


def run(progress: Progress) -> Measurement:
    """Time both of the same pages."""
    spec = KVPoolSpec(
        latent_format("fp8_ds_mla", kv_lora_rank=512, qk_rope_head_dim=64, page_size=64),
        index_format("fp8_scaled", index_head_dim=128, page_size=64),
        LAYERS,
        tuple(range(LAYERS)),
    )
    with ExitStack() as stack:
        source, destination = (
            SharedMemoryBuffer.create(f"cpkv-bench-{os.getpid()}-{end}", spec.pool_bytes(PAGES))
            for end in ("from", "to")
        )
        stack.callback(source.unlink)
        stack.callback(destination.unlink)
        rng = np.random.default_rng(SEED)
        source.tensor.numpy()[:] = rng.integers(0, 256, source.nbytes, dtype=np.uint8)
        pool = KVPool(spec, PAGES, source)
        transport = SharedMemoryTransport("bench-sender")
        stack.callback(transport.close)
        local = transport.register(source)
        remote = Region(destination.name, destination.nbytes)
        transport.connect(PeerInfo("bench-receiver", (remote,)))
        sources = PhysicalPages(rng.permutation(PAGES) + 1)
        runs = expand(
            merge_pages(sources, PhysicalPages(rng.permutation(PAGES) + 1)),
            PageAreas.between(spec, PAGES, PAGES),
            local_region=local.name,
            remote_region=remote.name,
        )
        samples = interleaved(
            {
                "send": lambda: transport.write("bench-receiver", runs).result(),
                "checksum": lambda: page_checksums(pool, sources),
            },
            ROUNDS,
            progress,
        )
    config: dict[str, object] = {
        "rounds": ROUNDS,
        "pages": PAGES,
        "layers": LAYERS,
        "bytes": PAGES * spec.bytes_per_page,
        "threads": 1,
    }
    return Measurement(config, samples)


BENCHMARK = Benchmark("page_checksums", "the checksum of a page, against sending it", run)

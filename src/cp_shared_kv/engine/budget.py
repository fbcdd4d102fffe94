"""What a rank's memory holds beside the scratch that its reads need. Arithmetic alone.

`sizing` uses it for the machine it runs on, the planner for machines that are not there.
"""

from __future__ import annotations

from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.memory.pool_sizes import PoolSizes
from cp_shared_kv.reads.gather_rounds import PAGES_PER_ROUND

SCRATCH_LAYERS = 2
"""A rank holds at most this many layers of one batch's prefix: the one in use, one ahead."""


def sharers(config: EngineConfig) -> int:
    """Ranks over which the pages of one prompt are spread."""
    return config.cp_size if config.shares_kv else 1


def prefix_scratch_bytes(config: EngineConfig, sizes: PoolSizes, prefix_pages: int) -> int:
    """What a rank needs to read a prefix of so many pages out of its peers' pools."""
    match config.resolved_kv_read:
        case "local":
            layers = 0
        case "sparse":  # all of one layer may be selected, and none of it is known ahead
            layers, prefix_pages = 1, pages_at_once(config, prefix_pages)
        case _:
            layers, prefix_pages = SCRATCH_LAYERS, pages_at_once(config, prefix_pages)
    page_bytes = layers * sizes.layer_page_bytes
    if layers == 1 and reads_ahead(config):
        page_bytes += sizes.index_page_bytes
    return prefix_pages * page_bytes


def reads_ahead(config: EngineConfig) -> bool:
    """Whether a rank reads pages of the next layer while it computes one."""
    return config.device == "cuda" and config.resolved_kv_read not in ("local", "collective")


def pages_at_once(config: EngineConfig, prefix_pages: int) -> int:
    """Of a prefix that is read in blocks, the most pages that a rank holds."""
    if config.kv_scratch_tokens is None:
        return prefix_pages
    return min(prefix_pages, config.kv_scratch_tokens // config.page_size)


def chunk_scratch_bytes(config: EngineConfig, sizes: PoolSizes) -> int:
    """What a rank of several needs for one chunk, however short the prefix.

    The chunk is gathered from shares that may be as uneven as one rank computing all of it. On a
    shared pool it is also staged in full, and a collective read packs a fixed number of pages a
    round.
    """
    if config.cp_size == 1:
        return 0
    ranks = config.cp_size + 1
    chunk_pages = -(-config.chunked_prefill_size // config.page_size) + 1
    gathered = ranks * chunk_pages * sizes.layer_page_bytes
    if config.resolved_kv_read == "local":
        return gathered
    largest_page = max(sizes.latent_page_bytes, sizes.index_page_bytes)
    rounds = PAGES_PER_ROUND * ranks * largest_page
    staged = SCRATCH_LAYERS if reads_ahead(config) else 1
    return gathered + staged * chunk_pages * sizes.layer_page_bytes + rounds


def longest_prefix_pages(config: EngineConfig, capacity: KVCapacity, context_length: int) -> int:
    """Pages of the longest prompt that the pool and the context leave room for."""
    return -(-min(capacity.logical_tokens, context_length) // config.page_size)


def capacity_of_rank(
    config: EngineConfig,
    sizes: PoolSizes,
    *,
    rank_bytes: int,
    context_length: int,
    page_bytes: int | None = None,
) -> KVCapacity:
    """The largest pool that `rank_bytes` hold beside the scratch for the longest prefix.

    `rank_bytes` is what is left for the pool and for all scratch. `page_bytes` is what a page
    costs, where that is more than its own bytes. CapacityError when not even one page fits.
    """
    page_bytes = sizes.bytes_per_page if page_bytes is None else page_bytes
    owners, page_size = sharers(config), config.page_size
    rank_bytes = max(0, rank_bytes - chunk_scratch_bytes(config, sizes))
    context_pages = -(-context_length // page_size)
    beside_scratch = rank_bytes - prefix_scratch_bytes(config, sizes, context_pages)
    paid_for = pages_at_once(config, context_pages)
    if beside_scratch // page_bytes - 1 >= -(-paid_for // owners):
        return KVCapacity.from_budget(beside_scratch, page_bytes, page_size, owners)
    # The pool is smaller than what was paid for: then the longest prefix is the pool itself.
    page_bytes += prefix_scratch_bytes(config, sizes, owners)
    return KVCapacity.from_budget(rank_bytes, page_bytes, page_size, owners)

"""The indexer's own store, with scratch in the place of the pool."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations


def store_index_k(original, self, forward_batch, layer_id, key, *, act_quant=None):
    """Around Indexer._store_index_k_cache. Collective for some readers, once a layer on every rank.

    The fused kernel takes the raw buffer and out_cache_loc, past any method of the pool. So both
    are exchanged for the time of the call; then the owned rows are kept, as bytes.
    """
    pool = forward_batch.token_to_kv_pool
    pool.acquire("index", layer_id)
    logical_locs = forward_batch.out_cache_loc
    forward_batch.out_cache_loc = pool.batch.slots_for(len(logical_locs))
    try:
        original(self, forward_batch, layer_id, key, act_quant=act_quant)
    finally:
        forward_batch.out_cache_loc = logical_locs
    pool.keep_owned("index", layer_id)

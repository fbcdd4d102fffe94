"""The pages of prompts that come and go: prefix hits, waiting, eviction. Needs no torch."""

from __future__ import annotations

import numpy as np

from cp_shared_kv import KVCapacity
from cp_shared_kv.errors import CapacityError
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.memory.page_keys import page_keys

pool = LogicalPool(KVCapacity(physical_pages=4, page_size=4, cp_size=2))


def show(event: str) -> None:
    counts = f"{pool.available_pages} free, {pool.cached_pages} cached, {pool.locked_pages} locked"
    print(f"{event}: {counts}")


# A prompt is a room. Each of its full pages has a key, a digest of its token ids.
prompt = np.arange(14)  # 14 tokens: three full pages of 4 and a tail
keys = page_keys(prompt, page_size=4)
first = pool.admit(1, keys, page_count=4)
assert first is not None
show(f"room 1 has pages {first.logical_pages}, {first.cached_pages} of them cached")
pool.publish(1, keys)  # the KV of its full pages is written: others may use it now
pool.release(1)  # the tail is free again, the full pages stay for the next prompt like it
show("room 1 is done")

# The same beginning again: three pages are there already, two are drawn.
again = pool.admit(2, keys, page_count=5)
assert again is not None
show(f"room 2 has pages {again.logical_pages}, {again.cached_pages} of them cached")

# None means not now; CapacityError means never. Both leave everything as it was.
print("room 3 of 4 pages, now:", pool.admit(3, keys[:0], page_count=4))
try:
    pool.admit(3, keys[:0], page_count=9)
except CapacityError as error:
    print("room 3 of 9 pages, ever:", error.value, "where the pool has", pool.total_pages)

# What only the cache holds gives way, the least recently used prefix first.
pool.release(2)
pool.admit(3, keys[:0], page_count=7)
show(f"room 3 got in, {pool.evicted_pages_total} pages were evicted")
pool.check_invariants()

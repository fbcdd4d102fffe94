"""Logical pools of a few pages, and requests on them, for the tests of what a pool does."""

from __future__ import annotations

import numpy as np

from cp_shared_kv.layout import KVCapacity
from cp_shared_kv.memory.logical_pool import Admission, LogicalPool

PAGE_SIZE = 4


def make_pool(
    physical_pages: int = 8, cp_size: int = 2, stripe_pages: int = 1, *, prefix_caching: bool = True
) -> LogicalPool:
    capacity = KVCapacity(physical_pages, PAGE_SIZE, cp_size, stripe_pages)
    return LogicalPool(capacity, prefix_caching=prefix_caching)


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def admitted(admission: Admission | None) -> Admission:
    assert admission is not None
    return admission


def run(pool: LogicalPool, room: int, page_keys: np.ndarray) -> Admission:
    """One request from its admission to its end, all of its pages published."""
    admission = admitted(pool.admit(room, page_keys, len(page_keys)))
    pool.publish(room, page_keys)
    pool.release(room)
    return admission


def state(pool: LogicalPool) -> tuple[object, ...]:
    """All that a caller can see, to compare before and after a call that fails."""
    pool.check_invariants()
    return (
        pool.available_pages,
        pool.cached_pages,
        pool.locked_pages,
        pool.free_pages_per_owner().tolist(),
        [(room, pool.pages(room).tolist(), pool.length_tokens(room)) for room in pool.rooms],
        [pool.match(np.arange(first, first + 8)) for first in range(0, 100, 10)],
    )

"""A pool's page map on its way to the front end: told by its owner, checked and joined there."""

from __future__ import annotations

from cp_shared_kv.engine.api import PoolPages
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import PageMapRequest, ToldPageMap
from cp_shared_kv.memory.logical_pool import LogicalPool


def told_page_map(request: PageMapRequest, pool: LogicalPool, epoch: int) -> ToldPageMap:
    """The answer of the process that owns `pool`."""
    pages = pool.page_map(request.most_bins)
    return ToldPageMap(
        ticket=request.ticket,
        epoch=epoch,
        physical_pages=pages.physical_pages,
        pages_per_bin=pages.pages_per_bin,
        free=pages.free.tolist(),
        cached=pages.cached.tolist(),
    )


def pool_pages(life: Life, told: ToldPageMap) -> PoolPages:
    """The same as a front end sees it."""
    sizes = told.bin_sizes()
    return PoolPages(
        unit=life.unit,
        role="prefill" if life.role == "prefill" else "decode",
        index=life.index,
        epoch=told.epoch,
        physical_pages=told.physical_pages,
        pages_per_bin=told.pages_per_bin,
        free=told.free,
        cached=told.cached,
        locked=[
            [size - free - cached for size, free, cached in zip(sizes, *row, strict=True)]
            for row in zip(told.free, told.cached, strict=True)
        ],
    )

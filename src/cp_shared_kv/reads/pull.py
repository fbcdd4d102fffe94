"""The whole prefix by one-sided copies out of the owners' mapped buffers (one host)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.reads.group import CPGroup
from cp_shared_kv.reads.plan import PagesByOwner, ReadPlan


class PullReader:
    """Copies each page straight from its owner's pool; no other rank takes part in a read."""

    def __init__(self, group: CPGroup, pools: Sequence[KVPool]) -> None:
        """pools: every rank's pool as this process has mapped it, by rank, its own among them."""
        sizes = {(pool.spec, pool.physical_pages) for pool in pools}
        if len(pools) != group.cp_size or len(sizes) != 1:
            raise ConfigError(
                "pools to pull from",
                value=f"{len(pools)} pools of {len(sizes)} shapes",
                allowed=f"{group.cp_size} pools of one shape",
            )
        self._group = group
        self._pools = pools
        self.pages_read = 0
        self.bytes_read = 0

    def begin(self, plan: ReadPlan) -> None:  # noqa: ARG002 (the same wait for any plan)
        """Wait for all ranks: their writes of the last forward are visible, their reads over.

        Pages of a prefix do not change during a forward, so its reads need no more than this.
        """
        self._group.barrier()

    def read(self, kind: PageKind, layer: int, pages: PagesByOwner, scratch: torch.Tensor) -> None:
        for owner, pool in enumerate(self._pools):
            owned = pages.owner_range(owner)
            torch.index_select(
                pool.pages(kind, layer), 0, pages.physical_pages[owned], out=scratch[owned]
            )
        self.pages_read += len(pages.logical_pages)
        self.bytes_read += len(pages.logical_pages) * scratch.shape[1]

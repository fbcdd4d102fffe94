"""The whole prefix by one kernel that reads every owner's GPU in place (one host)."""

from __future__ import annotations

import torch

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.memory.mapped_buffers import MappedBuffer
from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.memory.symmetric_buffers import SymmetricBuffer
from cp_shared_kv.reads.page_sources import PageSources
from cp_shared_kv.reads.plan import PagesByOwner, ReadPlan


class PeerPullReader:
    """Copies each page straight from its owner's pool; no other rank takes part in a read.

    Waits on the GPU alone: everything is queued on the current stream.
    """

    def __init__(self, cp_rank: int, pool: KVPool) -> None:
        """pool: this rank's, in a buffer that all ranks have mapped, each with one of its shape."""
        self._rank = cp_rank
        self._pool = pool
        self._buffer = symmetric_buffer(pool)
        self._sources: dict[tuple[int, PageKind], tuple[PagesByOwner, PageSources]] = {}
        self.pages_read = 0
        self.bytes_read = 0

    def begin(self, plan: ReadPlan) -> None:  # noqa: ARG002 (the same wait for any plan)
        """Line up with all ranks: their writes of the last forward are visible, their reads over.

        Pages of a prefix do not change during a forward, so its reads need no more than this.
        """
        self._buffer.barrier()
        self._sources = {}

    def sources(self, pages: PagesByOwner, kind: PageKind) -> PageSources:
        """Where the pages of that kind lie for this rank, in each layer alike."""
        return PageSources.build(
            pages,
            self._rank,
            self._buffer.peer_distances_bytes,
            self._pool.spec.page_bytes(kind),
            self._buffer.tensor.device,
        )

    def read(self, kind: PageKind, layer: int, pages: PagesByOwner, scratch: torch.Tensor) -> None:
        # Here, since without a GPU there need not be a triton.
        from cp_shared_kv.kernels.pull_pages import pull_pages

        found = self._sources_of(pages, kind)
        pull_pages(self._pool.pages(kind, layer), found.sources, found.order, scratch)
        self.pages_read += len(pages.logical_pages)
        self.bytes_read += len(pages.logical_pages) * scratch.shape[1]

    def _sources_of(self, pages: PagesByOwner, kind: PageKind) -> PageSources:
        # Each layer asks for the same pages again, all of the plan's or a part of them.
        key = (id(pages), kind)
        if key not in self._sources:
            self._sources[key] = (pages, self.sources(pages, kind))  # which keeps the id taken
        return self._sources[key][1]


def symmetric_buffer(pool: KVPool) -> SymmetricBuffer | MappedBuffer:
    """The pool's buffer; ConfigError where peers cannot reach it."""
    if not isinstance(pool.buffer, SymmetricBuffer | MappedBuffer):
        raise ConfigError(
            "the pool of a rank whose peers read it in place",
            value=type(pool.buffer).__name__,
            allowed="a symmetric or a mapped buffer",
            change="use --kv-read collective, or auto, where GPUs cannot be mapped",
        )
    return pool.buffer

"""What brings a batch's prefix pages to the source that its slots address."""

from __future__ import annotations

from typing import Protocol

import torch

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.reads.plan import PagesByOwner, ReadPlan


class PrefixReader(Protocol):
    """Copies the pages of a plan into scratch. All readers give the same bytes."""

    @property
    def pages_read(self) -> int:
        """Pages of one layer and kind copied since the start, this rank's own among them."""
        ...

    @property
    def bytes_read(self) -> int:
        """The bytes of those pages."""
        ...

    def begin(self, plan: ReadPlan) -> None:
        """Prepare for one forward pass; collective, before the first write of the forward."""
        ...

    def read(self, kind: PageKind, layer: int, pages: PagesByOwner, scratch: torch.Tensor) -> None:
        """Fill the first len(pages.logical_pages) pages of scratch u8[*, page_bytes].

        `pages` are the plan's, or a part of them for a reader that takes parts. Collective for
        some readers: all ranks call it in the same order, also one without tokens.
        """
        ...


class LocalReader:
    """For a rank that stores every page itself: its slots address its own pool, nothing moves."""

    pages_read = 0
    bytes_read = 0

    def begin(self, plan: ReadPlan) -> None:
        if not plan.in_place:
            raise ConfigError(
                "a local read cannot reach the pages of other ranks",
                value=f"{len(plan.owner_starts) - 1} owners",
                allowed="--kv-read pull, push, collective or sparse when cp_size is above 1",
            )

    def read(self, kind: PageKind, layer: int, pages: PagesByOwner, scratch: torch.Tensor) -> None:
        pass

"""Pages to read as a GPU follows them: where each begins in mapped memory, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.errors import ConfigError
from cp_shared_kv.kernels import ALIGNMENT_BYTES, WORD_BYTES
from cp_shared_kv.memory.device_copy import to_device
from cp_shared_kv.reads.plan import PagesByOwner


@dataclass(frozen=True)
class PageSources:
    """The pages of one batch and kind. One for all layers: in each pool they lie equally far apart.

    A pool's layers begin at the same offsets on every rank. So the distance from this rank's page
    0 of a layer to a peer's page is the same in each layer.
    """

    sources: torch.Tensor
    """i64[M], in scratch order: words of 8 bytes from this rank's page 0 to the page."""
    order: torch.Tensor
    """i32[M]: scratch pages in the order of fetching."""

    @classmethod
    def build(
        cls,
        pages: PagesByOwner,
        cp_rank: int,
        peer_distances_bytes: Sequence[int],
        page_bytes: int,
        device: torch.device,
    ) -> Self:
        """peer_distances_bytes: for each rank, from this rank's buffer to its buffer.

        Copies to the device without waiting for it. ConfigError for pages or buffers that are not
        whole multiples of 16 bytes.
        """
        lengths = [page_bytes, *peer_distances_bytes]
        if any(length % ALIGNMENT_BYTES for length in lengths):
            raise ConfigError(
                "page bytes and distances of the peers' buffers",
                value=lengths,
                allowed=f"multiples of {ALIGNMENT_BYTES}",
                change="take a page size that is a multiple of 16 tokens",
            )
        owner_pages = np.diff(pages.owner_starts)
        distances = np.repeat(np.array(peer_distances_bytes, np.int64) // WORD_BYTES, owner_pages)
        physical_pages = to_device(pages.physical_pages, device)
        sources = to_device(torch.from_numpy(distances), device)
        sources = sources + physical_pages * (page_bytes // WORD_BYTES)
        order = fetching_order(owner_pages, cp_rank).astype(np.int32)
        return cls(sources, to_device(torch.from_numpy(order), device))


def fetching_order(owner_pages: npt.NDArray[np.int64], cp_rank: int) -> npt.NDArray[np.int64]:
    """Scratch pages, all owners taking turns in proportion to their pages, the next rank first.

    Memory of one's own is many times faster than a link. Taken in turns, it costs nothing beside
    the links; before or after them it would cost its time. And with each rank beginning at its
    neighbour, no owner serves all the others at once.
    """
    cp_size = len(owner_pages)
    turns = (np.arange(cp_size) - cp_rank - 1) % cp_size
    shares = [(np.arange(pages) + 0.5) / max(1, pages) for pages in owner_pages]
    return np.lexsort((np.repeat(turns, owner_pages), np.concatenate(shares)))

"""Pools whose pages hold one number each, in every word of every layer and kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cp_shared_kv.engine.run_spec import PageLayout
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_format import PAGE_KINDS
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.testing.world.plan import PAGE_SIZE

POOL_SPEC = KVPoolSpec(
    latent_format("fp32", kv_lora_rank=2, qk_rope_head_dim=2, page_size=PAGE_SIZE),
    index_format("fp32", index_head_dim=2, page_size=PAGE_SIZE),
    num_layers=2,
    index_layers=(0,),
)
PAGE_LAYOUT = PageLayout(
    latent_format=POOL_SPEC.latent.fingerprint,
    index_format=POOL_SPEC.index.fingerprint,
    num_layers=POOL_SPEC.num_layers,
    index_layers=POOL_SPEC.index_layers,
    bytes_per_page=POOL_SPEC.bytes_per_page,
)


class NumberedPool:
    """A real pool of the smallest pages. A page that was written in part holds several numbers."""

    def __init__(self, physical_pages: int) -> None:
        self.buffer = PrivateBuffer(POOL_SPEC.pool_bytes(physical_pages))
        self.pool = KVPool(POOL_SPEC, physical_pages, self.buffer)
        self.bytes: npt.NDArray[np.uint8] = self.buffer.tensor.numpy()
        self._areas: list[npt.NDArray[np.int64]] = [
            self.pool.pages(kind, layer).numpy().view(np.int64)
            for kind in PAGE_KINDS
            for layer in POOL_SPEC.layers(kind)
        ]

    def fill(self, pages: Sequence[int], numbers: Sequence[int]) -> None:
        """Write whole pages."""
        column = np.array(numbers, dtype=np.int64)[:, None]
        for area in self._areas:
            area[list(pages)] = column

    def wrong(self, pages: Sequence[int], numbers: Sequence[int]) -> int | None:
        """Index of the first page that does not hold its number everywhere."""
        column = np.array(numbers, dtype=np.int64)[:, None]
        for area in self._areas:
            differs = (area[list(pages)] != column).any(axis=1)
            if differs.any():
                return int(np.argmax(differs))
        return None

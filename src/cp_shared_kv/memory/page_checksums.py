"""A checksum of each page's bytes over all layers, to find pages that a transfer has damaged."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.memory.page_format import PAGE_KINDS
from cp_shared_kv.memory.pool import KVPool


def page_checksums(pool: KVPool, physical_pages: PhysicalPages) -> npt.NDArray[np.int64]:
    """CRC-32 of the latent and index bytes of each page, in the pool's order of layers.

    Damage of up to 32 neighbouring bits never passes, any other with a chance of 2^-32.

    `physical_pages` int64[pages]; returns int64[pages], each 0..2^32-1. Pages on a GPU are copied
    to the host, a layer at a time.
    """
    pages = np.asarray(physical_pages, dtype=np.int64)
    sums = [0] * len(pages)
    for kind in PAGE_KINDS:
        for layer in pool.spec.layers(kind):
            of_layer, places = pool.pages(kind, layer), pages
            if of_layer.is_cuda:
                chosen = torch.from_numpy(pages).to(of_layer.device)
                of_layer, places = of_layer[chosen].cpu(), np.arange(len(pages))
            rows = of_layer.numpy()
            for place, page in enumerate(places.tolist()):
                sums[place] = zlib.crc32(rows[page].data, sums[place])
    return np.asarray(sums, dtype=np.int64)

"""A batch cut into blocks of queries, so that no score matrix grows with the prompt squared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cp_shared_kv.memory.device_copy import to_device
from cp_shared_kv.model.kv_access import RequestRows


@dataclass(frozen=True)
class BlockSizes:
    """How much one step takes: enough to fill the device, and no more than that."""

    most_rows: int
    most_scores: int
    """Of a block of queries, fp32."""
    most_gathered: int
    """Values of the latent rows that one call of attention gathers."""
    whole_calls: bool
    """Whether a call of attention has all its tokens even where only some of them are readable, and
    is made again for the others: of products in a batch the device may choose other kernels, and so
    give other bits, for a batch of another size."""


ON_CPU = BlockSizes(most_rows=128, most_scores=1 << 24, most_gathered=1 << 22, whole_calls=False)
"""64 MB of scores, 16 MB of gathered rows."""
ON_GPU = BlockSizes(most_rows=1024, most_scores=1 << 26, most_gathered=1 << 27, whole_calls=True)
"""256 MB of scores; rows of 113 tokens at 2,048 selected of 576 values."""


def block_sizes(device: torch.device) -> BlockSizes:
    """What suits a device."""
    return ON_GPU if device.type == "cuda" else ON_CPU


@dataclass(frozen=True)
class QueryBlock:
    """Rows [start, stop) of the rank's batch, all of one request.

    `visible` i64[n] is how many positions each row sees, its own included; `most_visible` their
    maximum.
    """

    start: int
    stop: int
    visible: torch.Tensor
    most_visible: int


@dataclass(frozen=True)
class RequestBlocks:
    """One request's blocks, and the slots (i64) of the positions that any of its rows sees."""

    slots: torch.Tensor
    blocks: tuple[QueryBlock, ...]


def query_blocks(
    requests: Sequence[RequestRows], positions: torch.Tensor
) -> tuple[RequestBlocks, ...]:
    """Cut a batch of i64[t] positions, in host memory; a request without a row has no blocks.

    Made once a forward, so that a layer needs no figure back from the device, which is that of
    the requests' slots.
    """
    return tuple(
        _cut(request, positions[request.start : request.stop] + 1)
        if request.stop > request.start
        else RequestBlocks(request.slots[:0], ())
        for request in requests
    )


def _cut(request: RequestRows, visible: torch.Tensor) -> RequestBlocks:
    most_visible = int(visible.max())
    device = request.slots.device
    sizes = block_sizes(device)
    rows = max(1, min(sizes.most_rows, sizes.most_scores // most_visible))
    return RequestBlocks(
        request.slots[:most_visible],
        tuple(
            QueryBlock(start, start + len(part), there, int(part.max()))
            for part, there, start in zip(
                visible.split(rows),
                to_device(visible, device).split(rows),
                range(request.start, request.stop, rows),
                strict=True,
            )
        ),
    )

"""A batch cut into blocks of queries, so that no score matrix grows with the prompt squared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cp_shared_kv.model.kv_access import RequestRows

_MOST_ROWS = 128
_MOST_SCORES = 1 << 24  # 64 MB of fp32


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
    """Cut a batch of i64[t] positions; requests without a row here are left out.

    Made once a forward, so that a layer needs no figure back from the device.
    """
    return tuple(
        _cut(request, positions[request.start : request.stop] + 1)
        for request in requests
        if request.stop > request.start
    )


def _cut(request: RequestRows, visible: torch.Tensor) -> RequestBlocks:
    most_visible = int(visible.max())
    rows = max(1, min(_MOST_ROWS, _MOST_SCORES // most_visible))
    return RequestBlocks(
        request.slots[:most_visible],
        tuple(
            QueryBlock(start, start + len(part), part, int(part.max()))
            for part, start in zip(
                visible.split(rows), range(request.start, request.stop, rows), strict=True
            )
        ),
    )

"""Gives every rank the rows of the whole chunk, of which each has computed a part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.errors import InvariantError
from cp_shared_kv.memory.device_copy import to_device
from cp_shared_kv.reads.group import CPGroup
from cp_shared_kv.reads.scratch import Scratch


class ChunkExchange:
    """An all-gather of page-format rows, padded to the largest share, put in batch order."""

    def __init__(
        self,
        group: CPGroup,
        shares: Sequence[npt.NDArray[np.int64]],
        row_bytes: int,
        scratch: Scratch,
    ) -> None:
        """shares: for each rank the batch's tokens that it computes; row_bytes: the widest row.

        The same on every rank. CapacityError when the buffers pass the scratch limit.
        """
        self._group = group
        self._tokens = len(shares[group.cp_rank])
        self._share = max(len(share) for share in shares)
        order = np.empty(sum(len(share) for share in shares), np.int64)
        for rank, share in enumerate(shares):
            order[share] = rank * self._share + np.arange(len(share))
        gathered_rows = 0 if group.cp_size == 1 else self._share * (group.cp_size + 1)
        self._buffer = scratch.take("chunk exchange", gathered_rows * row_bytes)
        self._order = to_device(torch.from_numpy(order), self._buffer.device)

    def all_gather(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For each part u8[t, width] of this rank's rows, u8[T, width] of the whole chunk.

        Collective, one all-gather for all parts; t may be 0, and then T may be 0 too.
        """
        for rows in parts:
            if len(rows) != self._tokens:
                raise InvariantError(
                    "rows stored by this rank", value=len(rows), allowed=str(self._tokens)
                )
        if self._group.cp_size == 1 or self._share == 0:
            return list(parts)
        widths = [rows.shape[1] for rows in parts]
        row_bytes = sum(widths)
        share_bytes = self._share * row_bytes
        local = self._buffer[:share_bytes]
        gathered = self._buffer[share_bytes : share_bytes * (self._group.cp_size + 1)]
        # The parts of a row travel side by side, so one order of rows serves them all.
        torch.cat(list(parts), dim=1, out=local.view(-1, row_bytes)[: self._tokens])
        self._group.all_gather_bytes(local, gathered.view(-1, share_bytes))
        columns = gathered.view(-1, row_bytes).split(widths, dim=1)
        return [part.index_select(0, self._order) for part in columns]

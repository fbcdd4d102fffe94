"""One rank's part of a forward pass: from a batch message to written pages and next tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.readers import KVReads
from cp_shared_kv.engine.recording import LogitsLog
from cp_shared_kv.engine.sampling.sampler import SampledToken, sample_where_numbers
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.sequence_split import SplitMode
from cp_shared_kv.memory.device_copy import to_device
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.reads.forward_kv import ForwardKV
from cp_shared_kv.reads.group import CPGroup
from cp_shared_kv.reads.plan import BatchSpan


class ModelRunner:
    """Runs batches on one rank. `execute` is collective: all ranks of the group, same batch."""

    def __init__(
        self,
        transformer: Transformer,
        pool: KVPool,
        layout: CpSharedKVLayout,
        group: CPGroup,
        reads: KVReads,
        split: SplitMode,
        log: LogitsLog | None = None,
    ) -> None:
        self._transformer = transformer
        self._pool = pool
        self._layout = layout
        self._group = group
        self._reads = reads
        self._split: SplitMode = split
        self._log = log

    @torch.inference_mode()
    def execute(
        self, batch: Batch, sampling: Mapping[int, SamplingState] | None = None
    ) -> dict[int, SampledToken | None]:
        """Compute the batch; returns the next token of each request whose last row is here, None
        where the logits of that row are no numbers.

        `sampling` says by room how the token is chosen; a room that is not in it is greedy.
        """
        kv = ForwardKV.build(
            self._pool,
            self._layout,
            self._group,
            self._reads.reader,
            [BatchSpan(r.pages(), r.prefix_tokens, r.new_tokens) for r in batch.requests],
            self._split,
            scratch=self._reads.scratch,
            sparse=self._reads.sparse,
            ahead=self._reads.ahead,
            dtype=self._transformer.dtype,
        )
        mine = kv.token_indices.numpy()
        hidden = self._transformer.forward(torch.from_numpy(batch.tokens()[mine]), kv.positions, kv)
        # The last token of a prompt chooses the first output token; its row is on one rank.
        last_index = np.cumsum([r.new_tokens for r in batch.requests]) - 1
        rows_of_last = np.searchsorted(mine, last_index)  # `mine` ascends
        wanted = [
            (request.room, row)
            for request, flat, row in zip(
                batch.requests, last_index.tolist(), rows_of_last.tolist(), strict=True
            )
            if request.last and row < len(mine) and mine[row] == flat
        ]
        rows = torch.tensor([row for _, row in wanted], dtype=torch.int64)
        if self._log is None:
            logits = self._transformer.logits(hidden[to_device(rows, hidden.device)]).cpu()
        else:
            every = self._transformer.logits(hidden).cpu()
            rooms = np.repeat(
                [r.room for r in batch.requests], [r.new_tokens for r in batch.requests]
            )
            self._log.append(batch.batch_id, rooms[mine], kv.positions.numpy(), every.numpy())
            logits = every[rows]
        tokens = sample_where_numbers(logits, [(sampling or {}).get(room) for room, _ in wanted])
        return {room: token for (room, _), token in zip(wanted, tokens, strict=True)}

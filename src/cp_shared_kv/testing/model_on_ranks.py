"""A model over the real pool and reads of one rank, driven by a schedule instead of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from cp_shared_kv.engine.config_values import KVCacheDtype
from cp_shared_kv.engine.model_spec import pool_spec
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.layout.sequence_split import SplitMode
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.model.transformer import Transformer
from cp_shared_kv.reads.forward_kv import ForwardKV
from cp_shared_kv.reads.full_view import FullViewReader
from cp_shared_kv.reads.group import CPGroup
from cp_shared_kv.reads.plan import BatchSpan
from cp_shared_kv.reads.prefix_reader import LocalReader
from cp_shared_kv.reads.scratch import Scratch
from cp_shared_kv.testing.rank_process import RankContext
from cp_shared_kv.testing.recording_ops import RecordedSelections
from cp_shared_kv.testing.schedule import Schedule, Span

_SCRATCH_LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class ComputedRows:
    """What was computed, a row for each (request, position), sorted by them."""

    rows: torch.Tensor
    """i64[n, 2]: request and position."""
    logits: torch.Tensor
    """fp32[n, vocab]"""
    selected: torch.Tensor
    """i64[layers, n, index_topk]: selected positions, ascending, padded with -1."""
    margins: torch.Tensor
    """fp32[layers, n]: the least selected score less the best left out; inf if none was."""

    @classmethod
    def merged(cls, parts: Sequence[ComputedRows]) -> ComputedRows:
        """The rows of several batches or ranks in one."""
        rows = torch.cat([part.rows for part in parts])
        in_order = sorted(range(len(rows)), key=rows.tolist().__getitem__)
        order = torch.tensor(in_order, dtype=torch.int64)
        return cls(
            rows[order],
            torch.cat([part.logits for part in parts])[order],
            torch.cat([part.selected for part in parts], dim=1)[:, order],
            torch.cat([part.margins for part in parts], dim=1)[:, order],
        )

    def save(self, path: Path) -> None:
        save_file(vars(self), path)

    @classmethod
    def load(cls, path: Path) -> ComputedRows:
        return cls(**load_file(path))


def compute_on_rank(
    context: RankContext,
    *,
    checkpoint: str,
    schedule: dict[str, Any],
    split: SplitMode,
    directory: str,
    kv_cache_dtype: KVCacheDtype = "fp32",
    shared: bool = True,
) -> None:
    """Run a schedule on one rank of a pool of processes; its rows go to a file of `directory`."""
    recorded = RecordedSelections()
    computed = compute(
        Transformer.load(checkpoint, ops=recorded.ops),
        recorded,
        context.group,
        msgspec.convert(schedule, Schedule),
        split,
        kv_cache_dtype,
        shared=shared,
    )
    computed.save(Path(directory) / f"rank{context.rank}.safetensors")


def compute(
    transformer: Transformer,
    recorded: RecordedSelections,
    group: CPGroup,
    schedule: Schedule,
    split: SplitMode,
    kv_cache_dtype: KVCacheDtype = "fp32",
    *,
    shared: bool = True,
) -> ComputedRows:
    """Run a schedule; returns this rank's rows. Collective: every rank, with the same schedule.

    `recorded` holds the ops that the transformer was made with. Not `shared`: every rank of the
    group stores all pages.
    """
    run = ScheduleRun(transformer, group, schedule, split, kv_cache_dtype, shared=shared)
    parts: list[ComputedRows] = []
    for batch in schedule.batches:
        hidden, rows = run.forward(batch)
        selections = recorded.take(transformer.config, len(rows))
        parts.append(ComputedRows(rows, transformer.logits(hidden), *selections))
    return ComputedRows.merged(parts)


class ScheduleRun:
    """One rank's pool and reads, sized for a schedule's requests."""

    def __init__(
        self,
        transformer: Transformer,
        group: CPGroup,
        schedule: Schedule,
        split: SplitMode,
        kv_cache_dtype: KVCacheDtype = "fp32",
        *,
        shared: bool = True,
    ) -> None:
        self._transformer, self._group = transformer, group
        self._requests = schedule.requests
        self._split: SplitMode = split
        self._pages = _pages_of_requests(schedule)
        logical_pages = int(max(map(max, self._pages)))
        owners, owner = (group.cp_size, group.cp_rank) if shared else (1, 0)
        physical_pages = -(-logical_pages // owners)
        self._layout = CpSharedKVLayout(
            schedule.page_size, owners, owner, physical_pages=physical_pages
        )
        spec = pool_spec(transformer.config, schedule.page_size, kv_cache_dtype, transformer.dtype)
        self._pool = KVPool(spec, physical_pages, PrivateBuffer(spec.pool_bytes(physical_pages)))
        self._scratch = Scratch(_SCRATCH_LIMIT_BYTES)
        self._reader = (
            LocalReader() if owners == 1 else FullViewReader(group, self._pool, self._scratch)
        )

    def forward(self, batch: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's hidden states [t, hidden] of a batch, and what they are of: i64[t, 2],
        request and position. Collective."""
        kv = ForwardKV.build(
            self._pool,
            self._layout,
            self._group,
            self._reader,
            [BatchSpan(self._pages[s.request], s.start, s.stop - s.start) for s in batch],
            self._split,
            scratch=self._scratch,
            dtype=self._transformer.dtype,
        )
        new = [token for s in batch for token in s.tokens_of(self._requests)]
        tokens = torch.tensor(new, dtype=torch.int64)[kv.token_indices]
        hidden = self._transformer.forward(tokens, kv.positions, kv)
        owners = torch.empty_like(kv.positions)
        for span, local in zip(batch, kv.requests, strict=True):
            owners[local.start : local.stop] = span.request
        return hidden, torch.stack([owners, kv.positions], dim=1)


def _pages_of_requests(schedule: Schedule) -> list[LogicalPages]:
    """Logical pages by request, in a shuffled order, so that none lies where it would by luck."""
    counts = [
        -(-len(r.token_ids) // schedule.page_size) - r.shared_pages for r in schedule.requests
    ]
    drawn = np.random.default_rng(0).permutation(sum(counts)) + 1
    pages: list[LogicalPages] = []
    for request, own in zip(
        schedule.requests, np.split(drawn, np.cumsum(counts)[:-1]), strict=True
    ):
        shared = pages[request.shares][: request.shared_pages] if request.shared_pages else own[:0]
        pages.append(LogicalPages(np.concatenate([shared, own])))
    return pages

"""The KV of one batch on one rank: what a forward pass stores, and all that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.errors import ConfigError, InvariantError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.sequence_split import SplitMode, split_tokens
from cp_shared_kv.memory.formats.plain import PlainLatentFormat
from cp_shared_kv.memory.page_format import PAGE_KINDS, PageKind
from cp_shared_kv.memory.pool import KVPool, WritePlan
from cp_shared_kv.memory.row_encoder import RowEncoder
from cp_shared_kv.reads.chunk_exchange import ChunkExchange
from cp_shared_kv.reads.group import CPGroup
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan
from cp_shared_kv.reads.prefix_reader import PrefixReader
from cp_shared_kv.reads.scratch import Scratch


@dataclass(frozen=True)
class LocalSpan:
    """One request as this rank sees it."""

    start: int
    stop: int
    """This rank's tokens [start, stop) belong to it; none when both are equal."""
    slots: torch.Tensor
    """i64[prefix_len + new_len]: the slot of each of its tokens, by position."""


@dataclass(frozen=True)
class LocalTokens:
    """The batch's new tokens that one rank computes."""

    indices: torch.Tensor
    """i64[t], in host memory: their places among the batch's new tokens, ascending."""
    positions: torch.Tensor
    """i64[t], in host memory: their positions in their requests."""
    requests: list[LocalSpan]

    @classmethod
    def of(
        cls,
        share: npt.NDArray[np.int64],
        requests: Sequence[BatchSpan],
        plan: ReadPlan,
    ) -> Self:
        """share i64[t]: the indices, as `split_tokens` gives them."""
        ends = np.cumsum([0, *(request.new_len for request in requests)])
        bounds = np.searchsorted(share, ends).tolist()
        # What turns a token's index in the batch into its position in its request.
        shifts = np.array([r.prefix_len for r in requests], np.int64) - ends[:-1]
        positions = share + np.repeat(shifts, np.diff(bounds))
        spans = [
            LocalSpan(start, stop, slots)
            for start, stop, slots in zip(bounds, bounds[1:], plan.request_slots, strict=False)
        ]
        return cls(torch.from_numpy(share), torch.from_numpy(positions), spans)


class ForwardKV:
    """The KV side of one forward pass: one batch, on one rank.

    For each layer in turn, every rank of the group calls `store` once, also a rank without
    tokens; then it may read that layer at the slots of `requests`. Where the bytes come from
    (own pool, peers' pools, a collective) is decided when it is built and shows nowhere else.
    """

    def __init__(
        self,
        pool: KVPool,
        plan: ReadPlan,
        exchange: ChunkExchange,
        reader: PrefixReader,
        writes: WritePlan,
        scratch_pages: dict[PageKind, torch.Tensor],
        tokens: LocalTokens,
        dtype: torch.dtype,
    ) -> None:
        """From its parts; use `build`."""
        self.dtype = dtype
        self.token_indices = tokens.indices
        self.positions = tokens.positions
        self.requests = tokens.requests
        self._pool = pool
        device = pool.buffer.tensor.device
        self._encoder = RowEncoder(pool.spec, len(tokens.indices), device)
        self._plan = plan
        self._exchange = exchange
        self._reader = reader
        self._writes = writes
        self._scratch_pages = scratch_pages
        self._sources: dict[PageKind, torch.Tensor] = {}
        self._layer = -1

    @classmethod
    def build(
        cls,
        pool: KVPool,
        layout: CpSharedKVLayout,
        group: CPGroup,
        reader: PrefixReader,
        requests: Sequence[BatchSpan],
        split: SplitMode,
        *,
        scratch: Scratch,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Plan a batch and take its scratch. Collective: all ranks, with the same requests.

        A layout of cp_size 1 in a larger group is the replicated pool: every rank stores all
        pages and only the computing is split. `dtype` is what reads are decoded to. Raises, on
        every rank alike, LayoutError for a batch that contradicts itself and CapacityError past
        the scratch limit. What was built before on the same scratch is no longer usable.
        """
        _check(pool, layout, group)
        spec, device = pool.spec, pool.buffer.tensor.device
        plan = ReadPlan.build(layout, requests).to(device)
        shares = split_tokens(split, [r.new_len for r in requests], group.cp_size)
        row_bytes = spec.latent.row_bytes + (spec.index.row_bytes if spec.index_layers else 0)
        exchange = ChunkExchange(group, shares, row_bytes, scratch)
        scratch_pages: dict[PageKind, torch.Tensor] = {}
        for kind in PAGE_KINDS:
            pages = plan.scratch_pages if spec.layers(kind) else 0
            page_bytes = spec.page_bytes(kind)
            taken = scratch.take(f"{kind} pages", pages * page_bytes)
            scratch_pages[kind] = taken.view(-1, page_bytes)
        reader.begin(plan)
        return cls(
            pool,
            plan,
            exchange,
            reader,
            WritePlan.build(layout, plan.new_locs).to(device),
            scratch_pages,
            LocalTokens.of(shares[group.cp_rank], requests, plan),
            dtype,
        )

    def store(
        self,
        layer: int,
        latent: torch.Tensor,
        k_pe: torch.Tensor,
        index_k: torch.Tensor | None,
    ) -> None:
        """Store this rank's new tokens of a layer and make the layer readable. Collective.

        latent [t, kv_lora_rank], k_pe [t, qk_rope_head_dim], index_k [t, index_head_dim] or None
        where the layer has no indexer. Values are encoded here, once; from then on only bytes
        move. The layer stored before is no longer readable.
        """
        spec = self._pool.spec
        if (index_k is not None) != (layer in spec.index_layers):
            raise InvariantError(
                f"index K of layer {layer}",
                value="none" if index_k is None else "given",
                allowed=f"given for the layers {spec.index_layers}, none for the others",
            )
        rows = {"latent": self._encoder.latent(latent, k_pe)}
        if index_k is not None:
            rows["index"] = self._encoder.index(index_k)
        self._layer = layer
        self._sources.clear()
        chunk = self._exchange.all_gather(list(rows.values()))
        for kind, chunk_rows in zip(PAGE_KINDS, chunk, strict=False):
            self._pool.write(kind, layer, chunk_rows, self._writes)
            self._sources[kind] = self._readable(kind, layer, chunk_rows)

    def latent(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """slots i64[*] -> latent [*, kv_lora_rank] and k_pe [*, qk_rope_head_dim]."""
        spec = self._pool.spec
        rows = spec.latent.gather_rows(self._source("latent", layer), slots.reshape(-1))
        latent, k_pe = spec.latent.decode(rows, self.dtype)
        return latent.unflatten(0, slots.shape), k_pe.unflatten(0, slots.shape)

    def latent_rows(self, layer: int) -> torch.Tensor | None:
        """Rows [*, kv_lora_rank + qk_rope_head_dim] as slots index them, where the format stores
        what is computed in; else None."""
        latent = self._pool.spec.latent
        if not isinstance(latent, PlainLatentFormat) or latent.stored != self.dtype:
            return None
        return self._source("latent", layer).view(-1, latent.row_bytes).view(self.dtype)

    def index_keys(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """slots i64[*] -> index K [*, index_head_dim]."""
        spec = self._pool.spec
        rows = spec.index.gather_rows(self._source("index", layer), slots.reshape(-1))
        return spec.index.decode(rows, self.dtype).unflatten(0, slots.shape)

    def _readable(self, kind: PageKind, layer: int, chunk_rows: torch.Tensor) -> torch.Tensor:
        """The pages that slots address for this layer: the pool's own, or scratch filled now."""
        if self._plan.in_place:
            return self._pool.pages(kind, layer)
        scratch = self._scratch_pages[kind]
        self._reader.read(kind, layer, self._plan, scratch)
        self._pool.spec.format(kind).scatter_rows(scratch, self._plan.chunk_slots, chunk_rows)
        return scratch

    def _source(self, kind: PageKind, layer: int) -> torch.Tensor:
        if layer != self._layer or kind not in self._sources:
            raise InvariantError(
                f"{kind} KV read of layer {layer}",
                allowed=f"{', '.join(self._sources) or 'nothing'} of layer {self._layer}",
                change="store a layer before reading it, and read index K where there is an index",
            )
        return self._sources[kind]


def _check(pool: KVPool, layout: CpSharedKVLayout, group: CPGroup) -> None:
    seat = (layout.cp_rank, layout.cp_size)
    if layout.cp_size != 1 and seat != (group.cp_rank, group.cp_size):
        raise ConfigError(
            "rank and size of the layout",
            value=seat,
            allowed=f"{(group.cp_rank, group.cp_size)} as in the group, or cp_size 1",
        )
    if (layout.page_size, layout.physical_pages) != (pool.spec.page_size, pool.physical_pages):
        raise ConfigError(
            "page size and physical pages of the layout",
            value=(layout.page_size, layout.physical_pages),
            allowed=f"{(pool.spec.page_size, pool.physical_pages)} as in the pool",
        )

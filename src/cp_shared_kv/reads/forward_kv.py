"""The KV of one batch on one rank: what a forward pass stores, and all that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.errors import ConfigError, InvariantError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.sequence_split import SplitMode, split_tokens
from cp_shared_kv.memory.formats.fp8_ds_mla import Fp8DsMlaFormat
from cp_shared_kv.memory.formats.plain import PlainLatentFormat
from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.memory.pool import KVPool, WritePlan
from cp_shared_kv.memory.row_decoder import attendable_rows
from cp_shared_kv.memory.row_encoder import RowEncoder
from cp_shared_kv.reads.chunk_exchange import ChunkExchange
from cp_shared_kv.reads.group import CPGroup
from cp_shared_kv.reads.index_pieces import IndexPlan
from cp_shared_kv.reads.index_source import IndexKeys, IndexSource
from cp_shared_kv.reads.latent_source import LatentSource, RowReader, SelectedRows, WholePrefix
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan
from cp_shared_kv.reads.prefix_reader import PrefixReader
from cp_shared_kv.reads.read_ahead import ReadAhead
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

    @property
    def seen(self) -> list[int]:
        """For each request how many of its positions the last of its tokens here sees, itself
        among them; 0 where it has none here."""
        return [
            int(self.positions[span.stop - 1]) + 1 if span.stop > span.start else 0
            for span in self.requests
        ]

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


@dataclass(frozen=True)
class SparseReads:
    """To read index K in blocks, and of latent KV the selected rows alone."""

    rows: RowReader
    most_tokens: int | None = None
    """Prefix tokens of one layer that scratch holds at once; None for any number."""
    chosen: Callable[[ReadPlan, int], bool] | None = None
    """Of a batch's plan and the most new tokens of a rank, whether it is read so; the same on all
    ranks. None for every batch."""

    def reads(self, plan: ReadPlan, shares: Sequence[npt.NDArray[np.int64]]) -> bool:
        """Whether a batch is read so, with these new tokens for each rank."""
        return self.chosen is None or self.chosen(plan, max(map(len, shares)))


class ForwardKV:
    """The KV side of one forward pass: one batch, on one rank.

    For each layer in turn, every rank of the group calls `store` once, and goes through
    `index_pieces` if the layer has an index, also a rank without tokens; then it may `bring` the
    slots that its tokens have selected, and read them. Where the bytes come from (own pool, peers'
    pools, a collective) is decided when it is built and shows nowhere else.
    """

    def __init__(
        self,
        pool: KVPool,
        exchange: ChunkExchange,
        writes: WritePlan,
        index: IndexSource,
        latent: LatentSource,
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
        self._exchange = exchange
        self._writes = writes
        self._index = index
        self._latent = latent
        self._seen = tokens.seen
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
        sparse: SparseReads | None = None,
        ahead: ReadAhead | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Plan a batch and take its scratch. Collective: all ranks, with the same requests.

        A layout of cp_size 1 in a larger group is the replicated pool: every rank stores all
        pages and only the computing is split. `dtype` is what reads are decoded to. `reader` brings
        whole pages: of both kinds, or of index K alone in batches that `sparse` reads. Raises, on
        every rank alike, LayoutError for a batch that contradicts itself and CapacityError past the
        scratch limit. With `ahead` whole pages of a layer come while the one before is computed.
        What was built before on the same scratch is no longer usable.
        """
        _check(pool, layout, group)
        spec, device = pool.spec, pool.buffer.tensor.device
        host_plan = ReadPlan.build(layout, requests)
        shares = split_tokens(split, [r.new_len for r in requests], group.cp_size)
        if sparse is not None and not (host_plan.in_place or sparse.reads(host_plan, shares)):
            sparse = None
        most_tokens = None if sparse is None else sparse.most_tokens
        most_pages = None if most_tokens is None else most_tokens // layout.page_size
        plan = host_plan.to(device)
        index_plan = IndexPlan.build(layout, requests, plan, most_pages).to(device)
        row_bytes = spec.latent.row_bytes + (spec.index.row_bytes if spec.index_layers else 0)
        exchange = ChunkExchange(group, shares, row_bytes, scratch)
        lane = None if ahead is None else ahead.lane_for(host_plan)
        if sparse is None or plan.in_place:
            latent: LatentSource = WholePrefix(pool, plan, reader, scratch, lane)
        else:
            rows = (
                len(plan.logical_pages) * layout.page_size if most_tokens is None else most_tokens
            )
            latent = SelectedRows(plan, sparse.rows, layout.page_size, rows)
        index = IndexSource(pool, plan, index_plan, reader, scratch, dtype, lane)
        reader.begin(plan)
        return cls(
            pool,
            exchange,
            WritePlan.build(layout, plan.new_locs).to(device),
            index,
            latent,
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
        rows = [self._encoder.latent(latent, k_pe)]
        if index_k is not None:
            rows.append(self._encoder.index(index_k))
        self._layer = layer
        chunk = self._exchange.all_gather(rows)
        self._pool.write("latent", layer, chunk[0], self._writes)
        self._latent.store(layer, chunk[0])
        if index_k is not None:
            self._pool.write("index", layer, chunk[1], self._writes)
            self._index.store(layer, chunk[1])

    def index_pieces(self, layer: int) -> Iterator[IndexKeys]:
        """The index keys that this rank's tokens see, request by request. Collective: every rank
        goes through all of them. The last key of a request is that of its last token here."""
        self._check_stored("index", layer, layer in self._pool.spec.index_layers)
        return self._index.pieces(layer, self._seen)

    def bring(self, layer: int, selected: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Make readable what this rank's tokens attend to, some tokens after the other.

        selected i64[t, k]: slots of `requests`, below 0 for none. Gives parts of the t tokens and
        the places i64[n, k] of their slots, -1 for none. A part is readable until the next.
        """
        self._check_stored("latent", layer)
        return self._latent.bring(layer, selected)

    def latent(self, layer: int, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """places i64[*] -> latent [*, kv_lora_rank] and k_pe [*, qk_rope_head_dim]."""
        self._check_stored("latent", layer)
        rows = self._latent.gather(layer, places.reshape(-1))
        latent, k_pe = self._pool.spec.latent.decode(rows, self.dtype)
        return latent.unflatten(0, places.shape), k_pe.unflatten(0, places.shape)

    def latent_rows(
        self, layer: int, places: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]] | None:
        """Rows [*, kv_lora_rank + qk_rope_head_dim] that places i64[t, k] name, and where in them.

        Some of the t tokens after the other: which, the rows, and their places i64[n, k] in those,
        below 0 for none. As they lie, where the format stores what is computed in; decoded by
        kernel, from fp8 to bf16 on a GPU; else None.
        """
        self._check_stored("latent", layer)
        match self._pool.spec.latent:
            case PlainLatentFormat(stored=stored) if stored == self.dtype:
                rows = self._latent.rows(layer).view(self.dtype)
                return iter([(slice(0, len(places)), rows, places)])
            case Fp8DsMlaFormat() as page_format if places.is_cuda and self.dtype == torch.bfloat16:
                return attendable_rows(page_format, self._latent.rows(layer), places)
            case _:
                return None

    def _check_stored(self, kind: PageKind, layer: int, has_it: bool = True) -> None:
        if layer != self._layer or not has_it:
            raise InvariantError(
                f"{kind} KV read of layer {layer}",
                allowed=f"that of layer {self._layer}" if self._layer >= 0 else "nothing yet",
                change="store a layer before reading it, and read index K where there is an index",
            )


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

"""SGLang's DSA pool, holding one rank's share: the pages it owns, and scratch to read from."""

# pyright: basic, reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from sglang.srt.mem_cache.memory_pool import NSATokenToKVPool

from cp_shared_kv.errors import InvariantError
from cp_shared_kv.integrations.sglang.batch import SharedBatch
from cp_shared_kv.integrations.sglang.page_formats import pool_spec
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.memory.buffers import Buffer
from cp_shared_kv.memory.page_format import PAGE_KINDS, PageKind
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.reads.prefix_reader import PrefixReader
from cp_shared_kv.reads.read_ahead import Lane, LayerPages
from cp_shared_kv.reads.scratch import Scratch


@dataclass(eq=False)
class Sharing:
    """How a rank's pools share: who it is, and by which parts of the core.

    A model and its draft have a pool each and take turns in the scratch.
    """

    capacity: KVCapacity
    cp_rank: int
    scratch: Scratch
    make_buffer: Callable[[int], Buffer]
    make_reader: Callable[[KVPool], PrefixReader]
    lane: Lane | None
    """Where a layer's prefix is read while the layer before is computed, if it is."""
    batch_pages: int
    """Pages of prefixes and chunk that scratch has room for, of one batch."""
    in_scratch: CPSharedNSATokenToKVPool | None = None
    """The pool whose batch is in scratch."""

    @property
    def layout(self) -> CpSharedKVLayout:
        c = self.capacity
        return CpSharedKVLayout(
            c.page_size, c.cp_size, self.cp_rank, physical_pages=c.physical_pages
        )


class CPSharedNSATokenToKVPool(NSATokenToKVPool):
    """To the scheduler a pool of logical size; in memory this rank's physical pages.

    Between `begin` and `end` of an extend batch, writes and reads go to scratch, which SGLang's
    kernels address by the tables that `begin`'s batch makes; what this rank owns of the chunk is
    then copied, as bytes, into its pages. Outside of a batch nothing can be read or written: a
    logical loc must never reach physical memory. Subclass with `sharing` set: see `shared_pool`.
    """

    sharing: Sharing

    def __init__(
        self,
        size,
        page_size,
        kv_lora_rank,
        dtype,
        qk_rope_head_dim,
        layer_num,
        device,
        index_head_dim,
        enable_memory_saver,
        kv_cache_dim,
        start_layer=None,
        end_layer=None,
    ):
        capacity = self.sharing.capacity
        if size != capacity.logical_tokens or page_size != capacity.page_size:
            raise InvariantError(
                "tokens and page size of a shared pool",
                value=(size, page_size),
                allowed=f"{capacity.logical_tokens} logical tokens, pages of {capacity.page_size}",
            )
        spec = pool_spec(kv_cache_dim, kv_lora_rank, qk_rope_head_dim, index_head_dim, layer_num)
        buffer = self.sharing.make_buffer(spec.pool_bytes(capacity.physical_pages))
        self.pages = KVPool(spec, capacity.physical_pages, buffer)
        self.layout = self.sharing.layout
        self.reader = self.sharing.make_reader(self.pages)
        self._forget()
        self._complete = False
        super().__init__(
            capacity.physical_tokens,
            page_size,
            kv_lora_rank,
            dtype,
            qk_rope_head_dim,
            layer_num,
            device,
            index_head_dim,
            enable_memory_saver,
            kv_cache_dim,
            start_layer,
            end_layer,
            index_buf_size=0,
        )
        # One page a layer was made for these, since none cannot be asked for.
        self.index_k_with_scale_buffer = [
            self.pages.pages("index", layer) for layer in range(layer_num)
        ]
        self._complete = True
        self._finalize_allocation_log(capacity.physical_tokens)
        # From here on what asks for the size means locs.
        self.size = capacity.logical_tokens

    def _create_buffers(self):
        rows = self.pages.spec.latent.row_bytes
        self.kv_buffer = [
            self.pages.pages("latent", layer).view(-1, 1, rows).view(self.store_dtype)
            for layer in range(self.layer_num)
        ]

    def _finalize_allocation_log(self, num_tokens):
        if self._complete:
            super()._finalize_allocation_log(num_tokens)

    def begin(self, batch: SharedBatch) -> None:
        """Take the scratch of a batch. Collective for some readers: every rank, the same batch."""
        if self.sharing.in_scratch is not None:
            self.sharing.in_scratch.end()
        self.sharing.in_scratch = self
        places = 1 if self.sharing.lane is None else 2
        taken: dict[PageKind, torch.Tensor] = {
            kind: self.sharing.scratch.take(
                f"{kind} pages",
                places * batch.scratch_pages * self.pages.spec.page_bytes(kind),
            ).view(places, batch.scratch_pages, -1)
            for kind in PAGE_KINDS
        }
        for pages in taken.values():
            pages[:, -1].zero_()
        self.reader.begin(batch.plan)
        self._layer_pages = {
            kind: LayerPages(
                kind, range(self.layer_num), batch.plan, self.reader, taken[kind], self.sharing.lane
            )
            for kind in PAGE_KINDS
        }
        self._taken = taken
        self._over_scratch = _over(self, taken)
        self.batch = batch

    def end(self) -> None:
        """The batch is over; what scratch holds is no longer of use."""
        if self.sharing.in_scratch is self:
            self.sharing.in_scratch = None
        self._forget()

    def _forget(self) -> None:
        """All that a batch has: nothing may keep its tables, or scratch that has been outgrown."""
        self.batch: SharedBatch | None = None
        self._layer_pages: dict[PageKind, LayerPages] = {}
        self._in_use: dict[PageKind, int] = {}
        self._taken: dict[PageKind, torch.Tensor] = {}
        self._over_scratch: NSATokenToKVPool | None = None

    def acquire(self, kind: PageKind, layer_id: int) -> None:
        """Bring a layer's prefix into scratch, once. Collective for some readers.

        Called by the first write of a layer, which every rank does alike; never by reads alone,
        some of which a rank without tokens leaves out.
        """
        self._current(kind, layer_id)
        if self._in_use.get(kind) != layer_id:
            self._layer_pages[kind].read(layer_id - self._first())
            self._in_use[kind] = layer_id

    def keep_owned(self, kind: PageKind, layer_id: int) -> None:
        """Copy the staged rows of the pages that this rank owns into its pool."""
        batch = self._current(kind, layer_id)
        layer = layer_id - self._first()
        page_format = self.pages.spec.format(kind)
        taken = self._taken[kind]
        rows = page_format.gather_rows(taken[layer % len(taken)], batch.writes.rows)
        owned = self.pages.pages(kind, layer)
        page_format.scatter_rows(owned, batch.writes.physical_locs, rows)

    def set_mla_kv_buffer(self, layer, loc, cache_k_nope, cache_k_rope):
        self.acquire("latent", layer.layer_id)
        slots = self._current("latent", layer.layer_id).slots_for(len(loc))
        over_scratch = self._read("latent", layer.layer_id)
        over_scratch.set_mla_kv_buffer(layer, slots, cache_k_nope, cache_k_rope)
        self.keep_owned("latent", layer.layer_id)

    def set_index_k_scale_buffer(self, layer_id, loc, index_k, index_k_scale):
        # loc holds slots: writes.py has put them in the place of out_cache_loc.
        self._read("index", layer_id).set_index_k_scale_buffer(
            layer_id, loc, index_k, index_k_scale
        )

    def get_index_k_with_scale_buffer(self, layer_id):
        return self._read("index", layer_id).get_index_k_with_scale_buffer(layer_id)

    def get_index_k_continuous(self, layer_id, seq_len, page_indices):
        return self._read("index", layer_id).get_index_k_continuous(layer_id, seq_len, page_indices)

    def get_index_k_scale_continuous(self, layer_id, seq_len, page_indices):
        pool = self._read("index", layer_id)
        return pool.get_index_k_scale_continuous(layer_id, seq_len, page_indices)

    def get_index_k_scale_buffer(
        self, layer_id, seq_len_tensor, page_indices, seq_len_sum, max_seq_len
    ):
        return self._read("index", layer_id).get_index_k_scale_buffer(
            layer_id, seq_len_tensor, page_indices, seq_len_sum, max_seq_len
        )

    def get_key_buffer(self, layer_id):
        return self._read("latent", layer_id).get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id):
        return self._read("latent", layer_id).get_value_buffer(layer_id)

    def get_mla_kv_buffer(self, layer, loc, dst_dtype=None):
        return self._read("latent", layer.layer_id).get_mla_kv_buffer(layer, loc, dst_dtype)

    def _refuse(self, *_args, **_kwargs):
        """For what moves or copies KV by loc, outside of a prefill batch."""
        raise InvariantError(
            "a shared pool moved or copied by loc", allowed="writes and reads of prefill batches"
        )

    set_kv_buffer = get_cpu_copy = load_cpu_copy = move_kv_cache = _refuse

    def _first(self) -> int:
        return self.start_layer or 0

    def _read(self, kind: PageKind, layer_id: int) -> NSATokenToKVPool:
        """The pool over scratch, which holds that layer."""
        self._current(kind, layer_id)
        assert self._over_scratch is not None
        if self._in_use.get(kind) != layer_id:
            raise InvariantError(
                f"{kind} KV of layer {layer_id} read before it was written",
                value=self._in_use.get(kind),
                change="a forward writes a layer's chunk before it reads the layer",
            )
        return self._over_scratch

    def _current(self, kind: PageKind, layer_id: int) -> SharedBatch:
        if self.batch is None:
            raise InvariantError(
                f"{kind} KV of layer {layer_id} used outside of an extend batch",
                change="serve prefill only",
            )
        return self.batch


class _InTurns:
    """A list of layers of which one or two are held: they take turns in these places."""

    def __init__(self, places: list[torch.Tensor]) -> None:
        self._places = places

    def __getitem__(self, layer: int) -> torch.Tensor:
        return self._places[layer % len(self._places)]


def _over(pool: CPSharedNSATokenToKVPool, taken: dict[PageKind, torch.Tensor]) -> NSATokenToKVPool:
    """SGLang's own pool, of the same shape, with scratch for its buffers."""
    rows = pool.pages.spec.latent.row_bytes
    stock = object.__new__(NSATokenToKVPool)
    stock.__dict__.update(pool.__dict__)
    stock.kv_buffer = _InTurns(
        [pages.view(-1, 1, rows).view(pool.store_dtype) for pages in taken["latent"]]
    )
    stock.index_k_with_scale_buffer = _InTurns(list(taken["index"]))
    return stock


def shared_pool(sharing: Sharing) -> type[CPSharedNSATokenToKVPool]:
    """The class to put in the place of NSATokenToKVPool; it is constructed like that."""
    return type("CPSharedNSATokenToKVPool", (CPSharedNSATokenToKVPool,), {"sharing": sharing})

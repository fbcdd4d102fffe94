"""One rank of a group: SGLang's own pool in replicated mode beside ours, fed the same batches.

What is SGLang's here: both pools' base class, the allocator's, the request table, the metadata of
the attention backend, the indexer's store, its kernels (in Triton's interpreter).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import types
import weakref
from collections.abc import Sequence
from typing import Any
from unittest import mock

import cpu_stand_ins  # noqa: F401 (before SGLang)
import numpy as np
import torch
from fast_kernels import fast_kernels
from sglang.srt.layers import dp_attention
from sglang.srt.layers.attention import nsa_backend
from sglang.srt.layers.attention.nsa import nsa_indexer, triton_kernel
from sglang.srt.layers.attention.nsa import utils as nsa_utils
from sglang.srt.layers.attention.nsa.dequant_k_cache import dequantize_k_cache_paged
from sglang.srt.mem_cache.memory_pool import NSATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from cp_shared_kv.errors import InvariantError
from cp_shared_kv.integrations.sglang import reads, writes
from cp_shared_kv.integrations.sglang.allocator import CPSharedPagedTokenToKVPoolAllocator
from cp_shared_kv.integrations.sglang.capacity import ScratchSize
from cp_shared_kv.integrations.sglang.pool import Sharing, shared_pool
from cp_shared_kv.integrations.sglang.pools import sharing_over
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.memory.page_format import PAGE_KINDS
from cp_shared_kv.testing.bitwise import assert_bitwise_equal
from cp_shared_kv.testing.lanes import EagerLane, LateLane
from cp_shared_kv.testing.rank_process import RankContext

PAGE, PHYSICAL_PAGES = 64, 10
LAYERS, DRAFT_LAYERS = 2, 1
LORA, ROPE, INDEX = 512, 64, 128
DTYPES = {"bfloat16": (torch.bfloat16, 576), "fp8_e4m3": (torch.float8_e4m3fn, 656)}

# Below any wrapper that another test of the session has had applied in this process.
_STOCK_METADATA = inspect.unwrap(nsa_backend.NativeSparseAttnBackend.init_forward_metadata)
_STOCK_STORE = inspect.unwrap(nsa_indexer.Indexer._store_index_k_cache)


class Engine:
    """What a model runner holds, with our pool or with stock's, and one forward of it."""

    def __init__(self, pool: Any, requests: ReqToTokenPool, backend: Any) -> None:
        self.pool, self.requests, self.backend = pool, requests, backend
        self.indexer = types.SimpleNamespace(block_size=128, scale_fmt="ue8m0")

    def begin(self, batch: Any) -> None:
        batch.token_to_kv_pool = self.pool
        _STOCK_METADATA(self.backend, batch)
        if self.shared:
            reads.begin_batch(None, self.backend, batch)

    @property
    def shared(self) -> bool:
        return type(self.pool) is not NSATokenToKVPool

    def store_index(self, batch: Any, layer: int, key: torch.Tensor) -> None:
        batch.token_to_kv_pool = self.pool
        arguments = (self.indexer, batch, layer, key)
        if self.shared:
            writes.store_index_k(_STOCK_STORE, *arguments, act_quant=triton_kernel.act_quant)
        else:
            _STOCK_STORE(*arguments, act_quant=triton_kernel.act_quant)

    def store_latent(self, batch: Any, layer: int, nope: torch.Tensor, rope: torch.Tensor) -> None:
        self.pool.set_mla_kv_buffer(_layer(layer), batch.out_cache_loc, nope, rope)


def run(
    context: RankContext,
    dtype: str,
    split: str,
    plan: list[list[list[Any]]],
    kernels: str,
    drafts: bool,
) -> int:
    """Runs each batch of `plan` on both; a batch lists [request, prefix_len, new_len, donor].

    donor: the request whose pages the prefix is, or None. kernels: "interpreted", SGLang's own, a
    second for a few tokens; or "torch", see fast_kernels.py. drafts: whether each batch
    is then a draft's, with a pool of its own. Returns how many pages were read.
    """
    args = ServerArgs(model_path="dummy")
    args.enable_nsa_prefill_context_parallel, args.nsa_prefill_cp_mode = True, split
    args.page_size = PAGE
    set_global_server_args_for_scheduler(args)
    with (
        mock.patch.object(nsa_utils, "get_attention_cp_size", return_value=context.size),
        mock.patch.object(nsa_utils, "get_attention_cp_rank", return_value=context.rank),
        mock.patch.object(dp_attention, "get_attention_dp_size", return_value=1),
        fast_kernels() if kernels == "torch" else contextlib.nullcontext(),
    ):
        return _Run(context, dtype, kernels, drafts).all(plan)


class _Run:
    def __init__(self, context: RankContext, dtype: str, kernels: str, drafts: bool) -> None:
        self.context = context
        self.kernels = kernels
        self.plans: list[weakref.ref[Any]] = []
        capacity = KVCapacity(PHYSICAL_PAGES, PAGE, context.size)
        torch_dtype, width = DTYPES[dtype]
        self.fp8 = width == 656
        settings = {
            "page_size": PAGE,
            "kv_lora_rank": LORA,
            "dtype": torch_dtype,
            "qk_rope_head_dim": ROPE,
            "device": "cpu",
            "index_head_dim": INDEX,
            "enable_memory_saver": False,
            "kv_cache_dim": width,
        }
        sharing = _sharing(context, capacity)
        # As with pulls between GPUs: here without a stream of their own, yet in the same turns.
        lane = LateLane() if context.size == 2 else EagerLane()
        sharing = dataclasses.replace(sharing, lane=lane)
        make = shared_pool(sharing)
        ours = make(capacity.logical_tokens, layer_num=LAYERS, **settings)
        requests = ReqToTokenPool(8, 2048, "cpu", False)
        self.allocator = CPSharedPagedTokenToKVPoolAllocator(
            capacity.logical_tokens,
            capacity.physical_tokens,
            PAGE,
            torch_dtype,
            "cpu",
            ours,
            True,
            context.size,
            context.rank,
        )
        self.requests = requests
        self.models: list[tuple[int, Engine, Engine]] = []
        """Layers, ours and stock: of the model, and of the draft that runs after it."""
        for layers in (LAYERS, DRAFT_LAYERS) if drafts else (LAYERS,):
            mine = (
                ours
                if layers == LAYERS
                else make(capacity.logical_tokens, layer_num=layers, **settings)
            )
            stock = NSATokenToKVPool(capacity.logical_tokens, layer_num=layers, **settings)
            engines = [Engine(pool, requests, _backend(self.fp8)) for pool in (mine, stock)]
            self.models.append((layers, *engines))
        # The same on every rank: each has the whole chunk after SGLang's all-gather.
        self.random = torch.Generator().manual_seed(7)
        # So that requests' pages lie in no order.
        fragments = self.allocator.alloc(5 * PAGE)
        self.allocator.free(fragments[PAGE : 2 * PAGE])
        self.allocator.free(fragments[3 * PAGE : 4 * PAGE])

    def all(self, plan: list[list[list[Any]]]) -> int:
        for spans in plan:
            batch = self._batch(spans)
            for model in self.models:
                self._forward(batch, *model)
            self._only_the_last_is_in_scratch()
        gc.collect()
        # What a batch has would stay on the GPU, and scratch that was outgrown with it.
        alive = sum(plan() is not None for plan in self.plans)
        assert alive == 1, f"the plans of {alive} batches are alive"
        for model in self.models:
            self._compare_pools(*model)
        return sum(ours.pool.reader.pages_read for _, ours, _ in self.models)

    def _forward(self, batch: Any, layers: int, ours: Engine, stock: Engine) -> None:
        for engine in (ours, stock):
            engine.begin(batch)
        self.plans.append(weakref.ref(ours.pool.batch.plan))
        rows = len(batch.out_cache_loc)
        for layer in range(layers):
            key = self._random(rows, INDEX)
            nope, rope = self._random(rows, 1, LORA), self._random(rows, 1, ROPE)
            for engine in (ours, stock):
                engine.store_index(batch, layer, key)
                engine.store_latent(batch, layer, nope, rope)
            self._compare_index(layer, ours, stock)
            self._compare_latent(layer, ours, stock)

    def _only_the_last_is_in_scratch(self) -> None:
        """The model's pool refuses reads once the draft's batch has taken its place in scratch."""
        for _, ours, _ in self.models[:-1]:
            try:
                ours.pool.get_key_buffer(0)
            except InvariantError:
                continue
            raise AssertionError("a pool read scratch that another pool's batch is in")

    def _batch(self, spans: list[list[Any]]) -> Any:
        prefix = [int(span[1]) for span in spans]
        new = [int(span[2]) for span in spans]
        total = [p + n for p, n in zip(prefix, new, strict=True)]
        table = self.requests.req_to_token
        for request, prefix_len, _, donor in spans:
            if donor is not None:
                table[request, :prefix_len] = table[donor, :prefix_len]
        last = [int(table[s[0], s[1] - 1]) if s[1] else -1 for s in spans]
        locs = self.allocator.alloc_extend(
            torch.tensor(prefix),
            torch.tensor(prefix),
            torch.tensor(total),
            torch.tensor(total),
            torch.tensor(last),
            sum(new),
        )
        assert locs is not None
        for (request, prefix_len, new_len, _), part in zip(spans, locs.split(new), strict=True):
            table[request, prefix_len : prefix_len + new_len] = part.int()
        padding = -sum(new) % self.context.size
        return types.SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(spans),
            seq_lens=torch.tensor(total),
            seq_lens_cpu=torch.tensor(total),
            seq_lens_sum=sum(total),
            extend_prefix_lens_cpu=prefix,
            extend_seq_lens_cpu=new,
            extend_seq_lens=torch.tensor(new),
            extend_num_tokens=sum(new),
            req_pool_indices=torch.tensor([span[0] for span in spans]),
            req_to_token_pool=self.requests,
            out_cache_loc=torch.cat((locs, locs.new_zeros(padding))),
            global_num_tokens_cpu=[sum(new) + padding],
            is_extend_in_batch=True,
            hisparse_coordinator=None,
            attn_cp_metadata=None,
            spec_info=None,
            token_to_kv_pool=None,
        )

    def _compare_index(self, layer: int, our_engine: Engine, stock_engine: Engine) -> None:
        """Every way in which the indexer reads: by request, by half a request, all at once."""
        ours, stock = our_engine.backend.forward_metadata, stock_engine.backend.forward_metadata
        lengths = stock.indexer_seq_lens_cpu.tolist()
        for i, length in enumerate(lengths):
            # In-seq-split reads twice a layer, as far as this rank's segments see.
            for seen in {length, max(1, length * (self.context.rank + 1) // self.context.size)}:
                for method in ("get_index_k_continuous", "get_index_k_scale_continuous"):
                    got = getattr(our_engine.pool, method)(layer, seen, ours.real_page_table[i])
                    wanted = getattr(stock_engine.pool, method)(
                        layer, seen, stock.real_page_table[i]
                    )
                    assert_bitwise_equal(got, wanted, f"{method}, layer {layer}, {seen} tokens")
        if lengths:
            totals = (sum(lengths), max(lengths))
            got = our_engine.pool.get_index_k_scale_buffer(
                layer, ours.indexer_seq_lens, ours.real_page_table, *totals
            )
            wanted = stock_engine.pool.get_index_k_scale_buffer(
                layer, stock.indexer_seq_lens, stock.real_page_table, *totals
            )
            for part, expected in zip(got, wanted, strict=True):
                assert_bitwise_equal(part, expected, f"get_index_k_scale_buffer, layer {layer}")

    def _compare_latent(self, layer: int, our_engine: Engine, stock_engine: Engine) -> None:
        """What a PAGED kernel gathers by token, and what the RAGGED one dequantises."""
        ours, stock = our_engine.backend.forward_metadata, stock_engine.backend.forward_metadata
        keys, expected_keys = (
            our_engine.pool.get_key_buffer(layer),
            stock_engine.pool.get_key_buffer(layer),
        )
        for i, length in enumerate(stock.indexer_seq_lens_cpu.tolist()):
            table, stock_table = ours.page_table_1[i, :length], stock.page_table_1[i, :length]
            assert_bitwise_equal(
                keys.view(torch.uint8)[table.long()],
                expected_keys.view(torch.uint8)[stock_table.long()],
                f"get_key_buffer, layer {layer}, request {i}",
            )
            if not self.fp8 and self.kernels == "interpreted":
                got = our_engine.pool.get_mla_kv_buffer(_layer(layer), table.long())
                wanted = stock_engine.pool.get_mla_kv_buffer(_layer(layer), stock_table.long())
                for part, expected in zip(got, wanted, strict=True):
                    assert_bitwise_equal(part, expected, "get_mla_kv_buffer")
        assert (ours.page_table_1_flattened is None) == (stock.page_table_1_flattened is None)
        if stock.page_table_1_flattened is not None:
            assert_bitwise_equal(
                keys.view(torch.uint8)[ours.page_table_1_flattened.long()],
                expected_keys.view(torch.uint8)[stock.page_table_1_flattened.long()],
                f"page_table_1_flattened, layer {layer}",
            )
        if stock.page_table_1_flattened is not None and self.kernels == "interpreted":
            assert_bitwise_equal(
                dequantize_k_cache_paged(keys, ours.page_table_1_flattened),
                dequantize_k_cache_paged(expected_keys, stock.page_table_1_flattened),
                f"dequantize_k_cache_paged, layer {layer}",
            )

    def _compare_pools(self, layers: int, ours: Engine, stock: Engine) -> None:
        """Each page that this rank owns, in its memory, is stock's page; there are no others."""
        layout = ours.pool.layout
        physical = PhysicalPages(np.arange(1, PHYSICAL_PAGES + 1))
        logical = torch.from_numpy(layout.physical_pages_to_logical(physical))
        for layer in range(layers):
            pages = {
                "latent": stock.pool.kv_buffer[layer].view(torch.uint8),
                "index": stock.pool.index_k_with_scale_buffer[layer],
            }
            for kind in PAGE_KINDS:
                mine = ours.pool.pages.pages(kind, layer)[1:]
                wanted = pages[kind].view(-1, mine.shape[1])[logical]
                assert_bitwise_equal(mine, wanted, f"owned {kind} pages of layer {layer}")
                assert wanted.any() or len(logical) == 0

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).bfloat16()


def _sharing(context: RankContext, capacity: KVCapacity) -> Sharing:
    size = ScratchSize(capacity.logical_pages, 64 << 20)
    return sharing_over(context.process_group, capacity, size, torch.device("cpu"))


def _backend(fp8: bool) -> Any:
    """The attention backend without its constructor, which asks for a GPU."""
    backend = object.__new__(nsa_backend.NativeSparseAttnBackend)
    backend.device = "cpu"
    backend.real_page_size = PAGE
    backend.nsa_index_topk = 2048
    backend.use_mha = False
    backend.nsa_prefill_impl = "flashmla_sparse"
    backend.nsa_decode_impl = "flashmla_sparse"
    backend.nsa_kv_cache_store_fp8 = fp8
    backend.enable_auto_select_prefill_impl = False
    backend.speculative_num_draft_tokens = None
    backend._arange_buf = torch.arange(16384, dtype=torch.int32)
    return backend


def _layer(layer_id: int) -> Any:
    return types.SimpleNamespace(layer_id=layer_id)


def refused_outside_a_batch(context: RankContext) -> Sequence[str]:
    """What the pool says when it is used by loc, without a plan."""
    capacity = KVCapacity(PHYSICAL_PAGES, PAGE, context.size)
    sharing = _sharing(context, capacity)
    pool = shared_pool(sharing)(
        capacity.logical_tokens,
        page_size=PAGE,
        kv_lora_rank=LORA,
        dtype=torch.bfloat16,
        qk_rope_head_dim=ROPE,
        layer_num=LAYERS,
        device="cpu",
        index_head_dim=INDEX,
        enable_memory_saver=False,
        kv_cache_dim=LORA + ROPE,
    )
    locs = torch.arange(PAGE, PAGE + 4)
    uses = [
        lambda: pool.get_key_buffer(0),
        lambda: pool.get_index_k_with_scale_buffer(0),
        lambda: pool.set_mla_kv_buffer(
            _layer(0), locs, torch.zeros(4, 1, LORA), torch.zeros(4, 1, ROPE)
        ),
        lambda: pool.get_cpu_copy(locs),
        lambda: pool.set_kv_buffer(_layer(0), locs, None, None),
    ]
    said: list[str] = []
    for use in uses:
        try:
            use()
        except Exception as error:
            said.append(type(error).__name__)
    assert pool.size == capacity.logical_tokens
    return said

"""Scratch: any batch that the limits allow is planned within it, and no more is set aside."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
import torch

from cp_shared_kv.engine.budget import reads_ahead
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.sizing import MEMORY_SHARE
from cp_shared_kv.errors import CapacityError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.pool import KVPool
from cp_shared_kv.reads.forward_kv import ForwardKV, SparseReads
from cp_shared_kv.reads.full_view import FullViewReader
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan
from cp_shared_kv.reads.prefix_reader import LocalReader, PrefixReader
from cp_shared_kv.reads.pull import PullReader
from cp_shared_kv.reads.pull_rows import PullRowsReader
from cp_shared_kv.reads.read_ahead import ReadAhead
from cp_shared_kv.reads.scratch import Scratch
from cp_shared_kv.testing.lanes import EagerLane

from .sized_groups import MIB, Group, config, limits_of, pool_spec


class OneOfManyRanks:
    """A group whose other ranks need no answer: planning a batch only ever waits for them."""

    def __init__(self, cp_rank: int, cp_size: int) -> None:
        self.cp_rank, self.cp_size = cp_rank, cp_size

    def all_gather_bytes(self, local: torch.Tensor, out: torch.Tensor) -> None:
        raise AssertionError("planning exchanges no bytes")

    def barrier(self) -> None:
        pass


def take_scratch(
    engine_config: EngineConfig, limits: EngineLimits, batches: list[list[BatchSpan]]
) -> Scratch:
    """The scratch of rank 0 after it has planned the batches; CapacityError past the limit."""
    spec = pool_spec(limits.page_size)
    group = OneOfManyRanks(0, limits.cp_size)
    pages = limits.capacity.physical_pages
    sharers = limits.cp_size if limits.shared else 1
    layout = CpSharedKVLayout(limits.page_size, sharers, 0, physical_pages=pages)
    pool = KVPool(spec, pages, PrivateBuffer(spec.pool_bytes(pages)))
    scratch = Scratch(limits.scratch_limit_bytes)
    readers: dict[str, PrefixReader] = {
        "collective": FullViewReader(group, pool, scratch),
        "pull": PullReader(group, [pool] * limits.cp_size),
        "sparse": PullReader(group, [pool] * limits.cp_size),
        "cheapest": PullReader(group, [pool] * limits.cp_size),
        "local": LocalReader(),
    }
    sparse, ahead = None, None
    if reads_ahead(engine_config):
        assert limits.kv_scratch_tokens is not None
        ahead = ReadAhead(EagerLane(), limits.kv_scratch_tokens // limits.page_size)
    if engine_config.resolved_kv_read in ("sparse", "cheapest"):
        rows, most_tokens = (
            PullRowsReader([pool] * limits.cp_size, scratch),
            limits.kv_scratch_tokens,
        )
        sparse = SparseReads(rows, most_tokens)
        if engine_config.resolved_kv_read == "cheapest":
            assert most_tokens is not None
            turns = count()  # any choice that a batch leaves

            def chosen(plan: ReadPlan, _new_tokens: int) -> bool:
                return len(plan.logical_pages) > most_tokens // 64 or next(turns) % 2 == 1

            sparse = SparseReads(rows, most_tokens, chosen)
    for spans in batches:
        ForwardKV.build(
            pool,
            layout,
            group,
            readers[engine_config.resolved_kv_read],
            spans,
            engine_config.nsa_prefill_cp_mode,
            scratch=scratch,
            sparse=sparse,
            ahead=ahead,
        )
    return scratch


def span(first_page: int, prefix_tokens: int, new_tokens: int, page_size: int = 64) -> BatchSpan:
    pages = -(-(prefix_tokens + new_tokens) // page_size)
    logical_pages = np.arange(first_page, first_page + pages, dtype=np.int64)
    return BatchSpan(LogicalPages(logical_pages), prefix_tokens, new_tokens)


@pytest.mark.parametrize(
    ("group", "device"),
    [
        *((group, "cpu") for group in ("replicated", "pull", "collective", "sparse")),
        *((group, "cuda") for group in ("auto on GPUs", "pull", "collective", "sparse")),
    ],
)
@pytest.mark.parametrize("split", ["in-seq-split", "round-robin-split"])
def test_the_scratch_limit_holds_the_longest_prefix_and_any_chunk(
    group: Group, device: str, split: str
) -> None:
    chosen = config(
        group,
        device=device,
        max_total_tokens=1024 if group != "replicated" else 4096,
        chunked_prefill_size=300,
        nsa_prefill_cp_mode=split,
    )
    limits = limits_of(chosen)
    one_token_each = [span(1 + i, 0, 1) for i in range(60)]
    whole_chunk = [span(1, 0, 300)]
    longest_prefix = [span(1, 4095 - 300, 300)]
    batches = [one_token_each, whole_chunk, longest_prefix]
    scratch = take_scratch(chosen, limits, batches + batches)
    assert 0 < scratch.bytes_in_use <= limits.scratch_limit_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("group", ["pull", "collective"])
def test_as_many_prefix_pages_as_the_limit_says_fit_scratch(group: Group, device: str) -> None:
    chosen = config(
        group, device=device, max_total_tokens=6400, chunked_prefill_size=64, context_length=640
    )
    limits = limits_of(chosen)
    assert limits.max_prefix_pages == 20  # of 400: two of the longest prefixes
    long_prefixes = [span(1 + 10 * i, 639, 1) for i in range(40)]
    take_scratch(chosen, limits, [[span(1, 0, 64)], long_prefixes[:2]])
    take_scratch(chosen, limits, [long_prefixes[:1], long_prefixes[:2], long_prefixes[:1]])
    with pytest.raises(CapacityError, match="scratch for"):
        take_scratch(chosen, limits, [long_prefixes])  # so nobody may build such a batch


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kv_scratch_tokens", [None, 1024, 1100])
def test_sparse_reads_take_any_batch_within_their_limit(
    kv_scratch_tokens: int | None, device: str
) -> None:
    chosen = config(
        "sparse",
        device=device,
        max_total_tokens=25600,
        chunked_prefill_size=64,
        kv_scratch_tokens=kv_scratch_tokens,
    )
    limits = limits_of(chosen)
    assert limits.kv_scratch_tokens == {None: 4096, 1024: 1024, 1100: 1088}[kv_scratch_tokens]
    assert limits.max_prefix_pages == limits.capacity.logical_pages
    long_prefixes = [span(1 + 64 * i, 4032 + 63, 1) for i in range(20)]
    fitting = [span(1, limits.kv_scratch_tokens - 64, 64)]
    scratch = take_scratch(chosen, limits, [[span(1, 0, 64)], fitting, long_prefixes, fitting])
    assert 0 < scratch.bytes_in_use <= limits.scratch_limit_bytes


@pytest.mark.parametrize("kv_scratch_tokens", [None, 1024])
def test_auto_on_gpus_has_scratch_for_whole_prefixes_and_for_rows(
    kv_scratch_tokens: int | None,
) -> None:
    chosen = config(
        "auto on GPUs",
        max_total_tokens=25600,
        chunked_prefill_size=64,
        kv_scratch_tokens=kv_scratch_tokens,
    )
    limits = limits_of(chosen)
    at_once = 4096 if kv_scratch_tokens is None else 1024
    assert limits.kv_scratch_tokens == at_once
    # Without the flag it may have to go by collective, which reads whole prefixes.
    pages = 2 * 4096 // 64 if kv_scratch_tokens is None else limits.capacity.logical_pages
    assert limits.max_prefix_pages == pages
    whole = [span(1, at_once - 64, 64)]
    long_prefixes = [span(1 + 64 * i, 4032 + 63, 1) for i in range(min(20, pages // 64))]
    for batches in ([whole, whole, long_prefixes], [long_prefixes, whole, whole]):
        scratch = take_scratch(chosen, limits, batches)
        assert 0 < scratch.bytes_in_use <= limits.scratch_limit_bytes


def test_what_scratch_does_not_take_the_pool_has() -> None:
    free_bytes, context = 64 * MIB, 1 << 20
    whole = limits_of(config("pull"), context=context, free_bytes=free_bytes)
    sparse = limits_of(config("sparse"), context=context, free_bytes=free_bytes)
    blocks = limits_of(
        config("sparse", kv_scratch_tokens=1024), context=context, free_bytes=free_bytes
    )
    assert whole.logical_tokens < sparse.logical_tokens < blocks.logical_tokens
    for limits in (whole, sparse, blocks):
        used = 4 * (limits.pool_bytes_per_rank + limits.scratch_limit_bytes)
        used += limits.decode_pool_bytes
        assert used <= free_bytes * MEMORY_SHARE
        assert used > 0.95 * free_bytes * MEMORY_SHARE


def test_a_group_that_reads_in_place_may_read_its_whole_pool() -> None:
    assert limits_of(config("replicated", max_total_tokens=6400)).max_prefix_pages == 100
    alone = limits_of(config("one rank", max_total_tokens=6400))
    assert alone.max_prefix_pages == 100
    assert alone.scratch_limit_bytes == 0

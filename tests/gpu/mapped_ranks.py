"""What the tests of plain CUDA memory that all ranks map run on each rank."""

from __future__ import annotations

import contextlib
import gc
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from cp_shared_kv.errors import StartupError
from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory import mapped_buffers
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.mapped_buffers import MappedBuffer
from cp_shared_kv.memory.page_format import PAGE_KINDS, PageKind
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.reads.peer_pull import PeerPullReader
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan
from cp_shared_kv.reads.read_ahead import LayerPages, StreamLane
from cp_shared_kv.reads.symmetric_scratch import SymmetricScratch
from cp_shared_kv.testing.one_gpu import (
    gpu_of,
    nccl_process_group,
    peer_memory,
    shares_a_gpu,
)
from cp_shared_kv.testing.rank_process import RankContext

POISON = 0xFF
QUARTER_BYTES = 256 << 20
LAYERS = 6
PHYSICAL_PAGES = 300
PAGE_SIZE = 64
TOKENS = 400 * PAGE_SIZE


def check_layers(context: RankContext, latent: str) -> dict[str, Any]:
    """Forwards over a mapped pool, two layers in scratch; every layer as its owners wrote it."""
    device = gpu_of(context)
    spec = KVPoolSpec(
        latent_format(latent, kv_lora_rank=512, qk_rope_head_dim=64, page_size=PAGE_SIZE),
        index_format("fp8_scaled", index_head_dim=128, page_size=PAGE_SIZE),
        LAYERS,
        tuple(range(LAYERS)),
    )
    buffer = MappedBuffer.create(
        spec.pool_bytes(PHYSICAL_PAGES), nccl_process_group(context), device
    )
    zero_before = not buffer.tensor.any()
    pool = KVPool(spec, PHYSICAL_PAGES, buffer)
    layout = CpSharedKVLayout(PAGE_SIZE, context.size, context.rank, physical_pages=PHYSICAL_PAGES)
    reader, lane = PeerPullReader(context.rank, pool), StreamLane(device)
    wrong: list[str] = []
    for forward in range(3):
        torch.cuda._sleep(30_000_000 * (context.rank + forward) % 90_000_000)
        _write(pool, seed=10 * forward + context.rank)
        pages = np.random.default_rng(forward).permutation(layout.logical_pages - 1)[:400] + 1
        plan = ReadPlan.build(layout, [BatchSpan(LogicalPages(pages), TOKENS - 5, 5)])
        reader.begin(plan)
        layer_pages = {}
        for kind in PAGE_KINDS:
            shape = (2, 401, spec.page_bytes(kind))
            taken = torch.full(shape, POISON, dtype=torch.uint8, device=device)
            layer_pages[kind] = LayerPages(kind, range(LAYERS), plan, reader, taken, lane)
        seen: dict[tuple[PageKind, int], torch.Tensor] = {}
        for layer in range(LAYERS):
            for kind in PAGE_KINDS:
                pages = layer_pages[kind].read(layer)
                torch.cuda._sleep(3_000_000)  # the layer's arithmetic
                seen[kind, layer] = pages[: len(plan.logical_pages)].clone()
        torch.cuda.synchronize()
        for (kind, layer), got in seen.items():
            if not torch.equal(got, _expected(context, pool, plan, kind, layer)):
                wrong.append(f"{kind} {layer} of forward {forward}")
        buffer.barrier()
    return {
        "zero_before": zero_before,
        "wrong": wrong,
        "own_distance": buffer.peer_distances_bytes[context.rank],
    }


def check_outgrown(context: RankContext) -> dict[str, float]:
    """Scratch that peers map, as it grows: what it has of the GPU, by its last size."""
    device = gpu_of(context)
    memory, process_group = peer_memory(context)
    sizes = [QUARTER_BYTES, 2 * QUARTER_BYTES, 3 * QUARTER_BYTES, 4 * QUARTER_BYTES]
    free = [_free_bytes(process_group)]
    scratch = SymmetricScratch(sizes[-1], process_group, device, memory)
    for nbytes in sizes:
        assert len(scratch.peer_distances_bytes(scratch.take("pages", nbytes))) == context.size
    free.append(_free_bytes(process_group))
    scratch.close()
    free.append(_free_bytes(process_group))
    on_this_gpu = context.size if shares_a_gpu(context) else 1
    unit = on_this_gpu * sizes[-1]
    return {"held": (free[0] - free[1]) / unit, "after": (free[0] - free[2]) / unit}


def check_unmappable(context: RankContext) -> dict[str, Any]:
    """A rank that cannot map its peers' memory: what every rank says, and what is left behind."""
    device = gpu_of(context)
    _, process_group = peer_memory(context)
    nccl = nccl_process_group(context)

    def refuse(*_arguments: object) -> None:
        raise StartupError("this rank cannot map")

    free_bytes = _free_bytes(process_group)
    said = "made"
    with contextlib.ExitStack() as stack:
        if context.rank == 1:
            stack.enter_context(mock.patch.object(mapped_buffers, "CudaIpcMapping", refuse))
        try:
            MappedBuffer.create(4 * QUARTER_BYTES, nccl, device)
        except StartupError as error:
            said = str(error)
    return {"said": said, "left": (free_bytes - _free_bytes(process_group)) / QUARTER_BYTES}


def _free_bytes(process_group: dist.ProcessGroup) -> int:
    """Of this GPU, when all ranks are through with what they have queued."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier(process_group)
    free_bytes, _ = torch.cuda.mem_get_info()
    dist.barrier(process_group)
    return free_bytes


def _write(pool: KVPool, seed: int) -> None:
    """Random bytes in every page, by this rank's stream."""
    generator = torch.Generator(pool.buffer.tensor.device).manual_seed(seed)
    whole = pool.buffer.tensor
    whole.copy_(torch.randint(0, 256, whole.shape, generator=generator, device=whole.device).byte())


def _expected(
    context: RankContext, pool: KVPool, plan: ReadPlan, kind: PageKind, layer: int
) -> torch.Tensor:
    """The plan's pages, by all-gather of whole layers."""
    mine = pool.pages(kind, layer).contiguous()
    everybody = [torch.empty_like(mine) for _ in range(context.size)]
    dist.all_gather(everybody, mine, group=nccl_process_group(context))
    parts = [
        everybody[owner][plan.physical_pages[plan.owner_range(owner)].to(mine.device)]
        for owner in range(context.size)
    ]
    return torch.cat(parts)

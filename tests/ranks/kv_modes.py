"""Pools of each mode on one rank: poisoned before they are written, read through each reader."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.sequence_split import SplitMode
from cp_shared_kv.memory.buffers import PrivateBuffer, SharedMemoryBuffer
from cp_shared_kv.memory.formats.plain import PlainIndexFormat
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.reads.forward_kv import SparseReads
from cp_shared_kv.reads.full_view import FullViewReader
from cp_shared_kv.reads.group import CPGroup
from cp_shared_kv.reads.prefix_reader import LocalReader, PrefixReader
from cp_shared_kv.reads.pull import PullReader
from cp_shared_kv.reads.pull_rows import PullRowsReader
from cp_shared_kv.reads.read_ahead import ReadAhead
from cp_shared_kv.reads.scratch import Scratch
from cp_shared_kv.testing.lanes import EagerLane, LateLane

POISON = 0xFF  # as fp32 a NaN, as an index far outside
NUM_LAYERS, INDEX_LAYERS = 3, (0, 2)
BLOCK_PIECE = 8
"""Where prefixes are cut in these tests, whose prefixes are short."""
NARROW, WIDE = (6, 2, 3), (256, 4, 128)
"""Latent, rope and index widths: a few bytes a row, or such as every format takes."""


class PoisonedScratch(Scratch):
    """Scratch in which nothing of an earlier batch survives, so that a missed row shows."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.taken: dict[str, torch.Tensor] = {}

    def take(self, purpose: str, nbytes: int) -> torch.Tensor:
        self.taken[purpose] = super().take(purpose, nbytes).fill_(POISON)
        return self.taken[purpose]


@dataclass
class Shape:
    """The numbers that a test varies, as they come over JSON."""

    name: str
    page_size: int
    stripe_pages: int
    physical_pages: int
    split: SplitMode
    index_sections: tuple[int, ...]
    """Bytes of an index key in each section of its page: 12 in all."""
    formats: tuple[str, str] | None = None
    """Latent and index format at the wide widths, instead of narrow fp32 in these sections."""

    @property
    def widths(self) -> tuple[int, int, int]:
        return NARROW if self.formats is None else WIDE


@dataclass
class Mode:
    """One way to keep and to read the KV, on one rank."""

    pool: KVPool
    layout: CpSharedKVLayout
    reader: PrefixReader
    scratch: PoisonedScratch
    sparse: SparseReads | None = None
    ahead: ReadAhead | None = None

    def source(self, kind: PageKind, layer: int) -> torch.Tensor | None:
        """The pages in which the slots of the layer stored last are looked up, if there are any."""
        if self.layout.cp_size == 1:
            return self.pool.pages(kind, layer)
        if self.sparse is not None or self.ahead is not None:
            return None
        return self.scratch.taken[f"{kind} pages"].view(-1, self.pool.spec.page_bytes(kind))


def make_spec(shape: Shape) -> KVPoolSpec:
    latent_width, rope_width, index_width = shape.widths
    latent = latent_format(
        "fp32" if shape.formats is None else shape.formats[0],
        kv_lora_rank=latent_width,
        qk_rope_head_dim=rope_width,
        page_size=shape.page_size,
    )
    if shape.formats is None:
        sections = shape.index_sections
        index = PlainIndexFormat("test", shape.page_size, sections, "test", torch.float32)
    else:
        index = index_format(
            shape.formats[1], index_head_dim=index_width, page_size=shape.page_size
        )
    return KVPoolSpec(latent, index, NUM_LAYERS, INDEX_LAYERS)


def shared_pools(group: CPGroup, spec: KVPoolSpec, physical_pages: int, name: str) -> list[KVPool]:
    """A poisoned pool on each rank, mapped by all; no segment keeps its name."""
    nbytes = spec.pool_bytes(physical_pages)
    own = SharedMemoryBuffer.create(f"{name}-{group.cp_rank}", nbytes)
    try:
        own.tensor.fill_(POISON)
        group.barrier()
        buffers = [
            own if rank == group.cp_rank else SharedMemoryBuffer.attach(f"{name}-{rank}", nbytes)
            for rank in range(group.cp_size)
        ]
        group.barrier()
    finally:
        own.unlink()
    return [KVPool(spec, physical_pages, buffer) for buffer in buffers]


def private_pool(spec: KVPoolSpec, physical_pages: int) -> KVPool:
    buffer = PrivateBuffer(spec.pool_bytes(physical_pages))
    buffer.tensor.fill_(POISON)
    return KVPool(spec, physical_pages, buffer)


def make_modes(group: CPGroup, shape: Shape) -> dict[str, Mode]:
    """The replicated pool, and on more than one rank the shared one with each of its readers."""
    spec = make_spec(shape)
    replicated_pages = shape.physical_pages * group.cp_size
    modes = {
        "replicated": Mode(
            private_pool(spec, replicated_pages),
            CpSharedKVLayout(shape.page_size, 1, 0, physical_pages=replicated_pages),
            LocalReader(),
            PoisonedScratch(1 << 24),
        )
    }
    if group.cp_size > 1:
        layout = CpSharedKVLayout(
            shape.page_size,
            group.cp_size,
            group.cp_rank,
            stripe_pages=shape.stripe_pages,
            physical_pages=shape.physical_pages,
        )
        pools = shared_pools(group, spec, shape.physical_pages, shape.name)
        scratch = PoisonedScratch(1 << 24)
        own = pools[group.cp_rank]
        modes["pull"] = Mode(own, layout, PullReader(group, pools), scratch)
        # As early as a read ahead may happen, or as late: one of them with each split.
        lane = EagerLane() if shape.split == "in-seq-split" else LateLane()
        reader, its_scratch = PullReader(group, pools), PoisonedScratch(1 << 24)
        modes["ahead"] = Mode(own, layout, reader, its_scratch, None, ReadAhead(lane))
        # All modes write the same bytes, so those of one pool can be read in several ways.
        for name, most_tokens in (("sparse", None), ("blocks", BLOCK_PIECE + 2 * shape.page_size)):
            scratch = PoisonedScratch(1 << 24)
            rows = SparseReads(PullRowsReader(pools, scratch), most_tokens)
            modes[name] = Mode(own, layout, PullReader(group, pools), scratch, rows)
        pool, scratch = private_pool(spec, shape.physical_pages), PoisonedScratch(1 << 24)
        modes["full_view"] = Mode(pool, layout, FullViewReader(group, pool, scratch), scratch)
    return modes

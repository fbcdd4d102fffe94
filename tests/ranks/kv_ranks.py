"""What the tests of the reads run on each rank: pools of each mode, fed with the same batches."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages
from cp_shared_kv.layout.sequence_split import SplitMode
from cp_shared_kv.memory.buffers import PrivateBuffer, SharedMemoryBuffer
from cp_shared_kv.memory.formats.plain import PlainIndexFormat
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_format import PAGE_KINDS, PageKind
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.reads import index_pieces
from cp_shared_kv.reads.forward_kv import BatchSpan, ForwardKV, LocalSpan, SparseReads
from cp_shared_kv.reads.full_view import FullViewReader
from cp_shared_kv.reads.group import CPGroup
from cp_shared_kv.reads.prefix_reader import LocalReader, PrefixReader
from cp_shared_kv.reads.pull import PullReader
from cp_shared_kv.reads.pull_rows import PullRowsReader
from cp_shared_kv.reads.read_ahead import ReadAhead
from cp_shared_kv.reads.scratch import Scratch
from cp_shared_kv.testing.bitwise import assert_bitwise_equal, first_difference
from cp_shared_kv.testing.lanes import EagerLane, LateLane
from cp_shared_kv.testing.rank_process import RankContext

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


class Truth:
    """What every token of the logical pool should hold, kept apart from all that is tested.

    Narrow rows are any bits whatever. Wide ones are what the format makes of random values; that
    these are the right bytes is for the formats' own tests to say.
    """

    def __init__(self, shape: Shape, cp_size: int) -> None:
        self.shape = shape
        self.spec = make_spec(shape)
        locs = (cp_size * shape.physical_pages + 1) * shape.page_size
        self.rows = {
            (kind, layer): torch.full(
                (locs, self.spec.format(kind).row_bytes), POISON, dtype=torch.uint8
            )
            for kind in PAGE_KINDS
            for layer in self.spec.layers(kind)
        }

    def compute(self, seed: int, layer: int, locs: torch.Tensor) -> dict[PageKind, torch.Tensor]:
        """New values for the batch's tokens, the same on every rank."""
        generator = torch.Generator().manual_seed(seed * NUM_LAYERS + layer)
        latent_width, rope_width, index_width = self.shape.widths
        widths: dict[PageKind, int] = {"latent": latent_width + rope_width, "index": index_width}
        computed: dict[PageKind, torch.Tensor] = {}
        for kind, width in widths.items():
            if (kind, layer) not in self.rows:
                continue
            if self.shape.formats is None:
                size = (len(locs), 4 * width)
                new = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
                computed[kind], self.rows[kind, layer][locs] = new.view(torch.float32), new
            else:
                exponents = torch.randint(-30, 30, (len(locs), 1), generator=generator)
                values = torch.randn(len(locs), width, generator=generator) * 2.0**exponents
                computed[kind] = values
                self.rows[kind, layer][locs] = self.encode(kind, values)
        return computed

    def encode(self, kind: PageKind, values: torch.Tensor) -> torch.Tensor:
        if kind == "index":
            return self.spec.index.encode(values)
        width = self.shape.widths[0]
        return self.spec.latent.encode(values[:, :width], values[:, width:])

    def decode(self, kind: PageKind, rows: torch.Tensor) -> torch.Tensor:
        if kind == "index":
            return self.spec.index.decode(rows, torch.float32)
        return torch.cat(self.spec.latent.decode(rows, torch.float32), dim=1)


def check_story(
    context: RankContext,
    shape: dict[str, Any],
    story: list[list[dict[str, Any]]],
) -> dict[str, int]:
    """`run_story` for a rank process; returns how much was compared and computed."""
    run = run_story(context.group, shape, story)
    return {"rows": run.rows_checked, "tokens": run.tokens_computed}


def run_story(group: CPGroup, shape: dict[str, Any], story: list[list[dict[str, Any]]]) -> Run:
    """Run the batches of a story in every mode; each read must give the bytes once written."""
    run = Run(group, msgspec.convert(shape, Shape))
    for batch in story:
        run.forward(batch)
    run.check_pools()
    return run


def check_out_of_step(
    context: RankContext, shape: dict[str, Any], story: list[list[dict[str, Any]]]
) -> None:
    """A story in pull mode alone, whose ranks sleep now and then, also before they write."""
    run = Run(context.group, msgspec.convert(shape, Shape), sleep_seconds=0.03)
    run.modes = {"pull": run.modes["pull"]}  # the collectives of the others would keep them in step
    pool = run.modes["pull"].pool
    write = pool.write

    def write_late(*arguments: Any) -> None:
        run.dawdle()
        write(*arguments)

    pool.write = write_late
    for batch in story:
        run.forward(batch)


def check_wrong_byte(
    context: RankContext,
    shape: dict[str, Any],
    story: list[list[dict[str, Any]]],
    mode: str,
    kind: PageKind,
    logical_page: int,
) -> str:
    """Flip a byte of the page, on its owner, before the last batch; returns what the check says."""
    run = Run(context.group, msgspec.convert(shape, Shape))
    for batch in story[:-1]:
        run.forward(batch)
    pool, layout = run.modes[mode].pool, run.modes[mode].layout
    pages = LogicalPages(np.array([logical_page]))
    if layout.owned_pages_mask(pages)[0]:
        pool.pages(kind, 0)[layout.logical_pages_to_physical(pages)[0], 5] ^= 0x40
    try:
        run.forward(story[-1])
    except AssertionError as error:
        return str(error)
    return "nothing noticed"


def seen_by(kv: ForwardKV, span: LocalSpan) -> int:
    """How many positions of a request its last token on this rank sees."""
    return int(kv.positions[span.stop - 1]) + 1 if span.stop > span.start else 0


class Run:
    """The same batches in every mode, each read compared with the truth."""

    def __init__(self, group: CPGroup, shape: Shape, sleep_seconds: float = 0.0) -> None:
        self.sleep_seconds = sleep_seconds
        self.random = random.Random(group.cp_rank)
        self.group = group
        self.shape = shape
        self.modes = make_modes(group, shape)
        self.truth = Truth(shape, group.cp_size)
        self.forwards = 0
        self.rows_checked = 0
        self.tokens_computed = 0

    def forward(self, batch: list[dict[str, Any]]) -> None:
        spans = [
            BatchSpan(LogicalPages(np.array(s["pages"], np.int64)), s["prefix_len"], s["new_len"])
            for s in batch
        ]
        self.forwards += 1
        kvs = {name: self.build(mode, spans) for name, mode in self.modes.items()}
        locs = [torch.from_numpy(self.locs(span)) for span in spans]
        none = torch.empty(0, dtype=torch.int64)
        new = [its_locs[span.prefix_len :] for its_locs, span in zip(locs, spans, strict=True)]
        new_locs = torch.cat([none, *new])
        mismatches: list[str] = []
        for layer in range(NUM_LAYERS):
            computed = self.truth.compute(self.forwards, layer, new_locs)
            for name, kv in kvs.items():
                mine = {kind: rows[kv.token_indices] for kind, rows in computed.items()}
                latent, k_pe = mine["latent"].split(self.shape.widths[:2], dim=1)
                self.dawdle()
                kv.store(layer, latent, k_pe, mine.get("index"))
                self.dawdle()
                keys = self.keys(kv, layer) if "index" in computed else {}
                for number, (span, its_locs) in enumerate(zip(kv.requests, locs, strict=True)):
                    for kind in computed:
                        where = f"{name}: {kind} of layer {layer}, request {number}"
                        expected = self.truth.rows[kind, layer][its_locs]
                        wanted = self.truth.decode(kind, expected)
                        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
                        pages = self.modes[name].source(kind, layer)
                        if pages is not None:
                            held = self.truth.spec.format(kind).gather_rows(pages, span.slots)
                            pairs.append((held, expected))
                        if kind == "index":
                            seen = seen_by(kv, span)
                            pairs.append((keys[number], wanted[:seen]))
                        else:
                            pairs.append((self.bring(kv, layer, span.slots), wanted))
                        for got, right in pairs:
                            if difference := first_difference(
                                got.view(torch.uint8), right.view(torch.uint8)
                            ):
                                mismatches.append(f"{where}: {difference}")
                            self.rows_checked += len(got)
        any_kv = next(iter(kvs.values()))
        self.tokens_computed += len(any_kv.token_indices)
        self.check_local_tokens(any_kv, spans)
        assert not mismatches, "; ".join(mismatches)

    def build(self, mode: Mode, spans: list[BatchSpan]) -> ForwardKV:
        with patch.object(index_pieces, "PIECE_TOKENS", BLOCK_PIECE):
            return ForwardKV.build(
                mode.pool,
                mode.layout,
                self.group,
                mode.reader,
                spans,
                self.shape.split,
                scratch=mode.scratch,
                sparse=mode.sparse,
                ahead=mode.ahead,
            )

    def dawdle(self) -> None:
        if self.sleep_seconds and self.random.random() < 0.15:
            time.sleep(self.sleep_seconds)

    def locs(self, span: BatchSpan) -> np.ndarray:
        """One token after the other, on purpose: not the arithmetic of the read plan."""
        size = self.shape.page_size
        return np.array(
            [
                int(span.logical_pages[token // size]) * size + token % size
                for token in range(span.prefix_len + span.new_len)
            ],
            np.int64,
        )

    def keys(self, kv: ForwardKV, layer: int) -> dict[int, torch.Tensor]:
        """The index keys of each request, its pieces put together."""
        width = self.shape.widths[2]
        keys = {number: torch.empty(0, width) for number in range(len(kv.requests))}
        for piece in kv.index_pieces(layer):
            assert piece.start == len(keys[piece.request])
            assert piece.start % BLOCK_PIECE == 0
            keys[piece.request] = torch.cat([keys[piece.request], piece.keys])
        return keys

    def bring(self, kv: ForwardKV, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """The latent KV of all slots, as if tokens had selected them: one, none and one again."""
        selected = torch.stack([slots, torch.full_like(slots, -1), slots.flip(0)], dim=1)
        read = [torch.empty(0, sum(self.shape.widths[:2]))]
        for part, places in kv.bring(layer, selected):
            assert (places[:, 1] == -1).all()
            rows = torch.cat(kv.latent(layer, places[:, [0, 2]]), dim=2)
            read.append(rows[:, 0])
            for number, last in zip(range(part.start, part.stop), rows[:, 1], strict=True):
                twin = len(slots) - 1 - number - part.start
                if 0 <= twin < len(rows):
                    assert torch.equal(*(r.view(torch.int32) for r in (last, rows[twin, 0])))
        return torch.cat(read)

    def check_local_tokens(self, kv: ForwardKV, spans: list[BatchSpan]) -> None:
        """Which request and position each of this rank's tokens has."""
        place = [
            (number, span.prefix_len + token)
            for number, span in enumerate(spans)
            for token in range(span.new_len)
        ]
        mine = [place[index] for index in kv.token_indices.tolist()]
        told = [
            (number, position)
            for number, span in enumerate(kv.requests)
            for position in kv.positions[span.start : span.stop].tolist()
        ]
        assert told == mine

    def check_pools(self) -> None:
        """Each pool holds the rows its rank owns, and poison everywhere else: no other write."""
        for name, mode in self.modes.items():
            pages = mode.layout.physical_pages_to_logical(
                PhysicalPages(np.arange(mode.pool.physical_pages + 1))
            )
            for kind, layer in self.truth.rows:
                assert_bitwise_equal(
                    mode.pool.pages(kind, layer),
                    self.pages_of(kind, layer)[torch.from_numpy(pages)],
                    f"{kind} pages of layer {layer} in the {name} pool",
                )

    def pages_of(self, kind: PageKind, layer: int) -> torch.Tensor:
        """The true rows as pages: the first section of all tokens of a page, then the next."""
        rows = self.truth.rows[kind, layer]
        sections = self.truth.spec.format(kind).sections
        parts = rows.view(-1, self.shape.page_size, rows.shape[1]).split(sections, dim=2)
        return torch.cat([part.flatten(1) for part in parts], dim=1)

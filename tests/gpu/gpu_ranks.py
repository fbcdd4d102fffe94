"""What the tests of reads between GPUs run on each rank."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.page_format import PAGE_KINDS, PageKind
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.memory.symmetric_buffers import SymmetricBuffer, gpu_buffer, why_not_mapped
from cp_shared_kv.reads import index_pieces, peer_reader
from cp_shared_kv.reads.forward_kv import ForwardKV, SparseReads
from cp_shared_kv.reads.full_view import FullViewReader
from cp_shared_kv.reads.group import TorchGroup
from cp_shared_kv.reads.peer_pull import PeerPullReader
from cp_shared_kv.reads.peer_push import PeerPushReader
from cp_shared_kv.reads.peer_reader import PeerReader
from cp_shared_kv.reads.plan import BatchSpan, ReadPlan
from cp_shared_kv.reads.prefix_reader import LocalReader, PrefixReader
from cp_shared_kv.reads.read_ahead import ReadAhead, StreamLane
from cp_shared_kv.reads.scratch import Scratch
from cp_shared_kv.reads.selected_rows import SelectedRowsReader
from cp_shared_kv.reads.symmetric_scratch import SymmetricScratch
from cp_shared_kv.testing.one_gpu import gpu_of, nccl_process_group, peer_memory
from cp_shared_kv.testing.rank_process import RankContext

POISON = 0xFF
LAYERS, INDEX_LAYERS = 3, (0, 2)
LATENT, ROPE, INDEX = 512, 64, 128
PAGE_SIZE = 16
SCRATCH_BYTES = 1 << 26
BLOCK_PIECE = 8
BLOCK_TOKENS = BLOCK_PIECE + 2 * PAGE_SIZE
"""Of most prefixes of a story only a part."""


class PoisonedScratch(Scratch):
    """Scratch in which nothing of an earlier batch survives."""

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        super().__init__(limit_bytes, device)
        self.taken: dict[str, torch.Tensor] = {}

    def take(self, purpose: str, nbytes: int) -> torch.Tensor:
        self.taken[purpose] = super().take(purpose, nbytes).fill_(POISON)
        return self.taken[purpose]


class PoisonedSymmetricScratch(PoisonedScratch, SymmetricScratch):
    """The same, for scratch that peers write to."""

    def __init__(self, limit_bytes: int, context: RankContext, device: torch.device) -> None:
        memory, process_group = peer_memory(context)
        SymmetricScratch.__init__(self, limit_bytes, process_group, device, memory)
        self.taken = {}


class Mode:
    """One way to keep and to read the KV."""

    def __init__(
        self,
        pool: KVPool,
        layout: CpSharedKVLayout,
        reader: PrefixReader,
        scratch: PoisonedScratch,
        sparse: SparseReads | None = None,
        ahead: ReadAhead | None = None,
    ) -> None:
        self.pool, self.layout, self.reader, self.scratch = pool, layout, reader, scratch
        self.sparse, self.ahead = sparse, ahead

    @property
    def as_a_model(self) -> bool:
        """Whether it is looked at as a model does, instead of at scratch."""
        return self.sparse is not None or self.ahead is not None

    def source(self, kind: PageKind, layer: int) -> torch.Tensor | None:
        """The pages in which the slots of the layer stored last are looked up, if all are there."""
        if self.as_a_model:
            return None
        if self.layout.cp_size == 1:
            return self.pool.pages(kind, layer)
        return self.scratch.taken[f"{kind} pages"].view(-1, self.pool.spec.page_bytes(kind))


def nccl_of(context: RankContext) -> TorchGroup:
    return TorchGroup(nccl_process_group(context))


def make_spec(latent_name: str, index_name: str) -> KVPoolSpec:
    latent = latent_format(
        latent_name, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, page_size=PAGE_SIZE
    )
    index = index_format(index_name, index_head_dim=INDEX, page_size=PAGE_SIZE)
    return KVPoolSpec(latent, index, LAYERS, INDEX_LAYERS)


def make_modes(context: RankContext, spec: KVPoolSpec, physical_pages: int) -> dict[str, Mode]:
    device, nbytes = gpu_of(context), spec.pool_bytes(physical_pages)
    replicated_pages = physical_pages * context.size

    nccl = nccl_of(context)
    memory, process_group = peer_memory(context)

    def shared_pool() -> KVPool:
        buffer = memory.create(nbytes, process_group, device)
        buffer.tensor.fill_(POISON)
        return KVPool(spec, physical_pages, buffer)

    layout = CpSharedKVLayout(
        PAGE_SIZE, context.size, context.rank, stripe_pages=2, physical_pages=physical_pages
    )
    replicated = KVPool(
        spec, replicated_pages, PrivateBuffer(spec.pool_bytes(replicated_pages), device)
    )
    pulled, pushed, either, gathered = (shared_pool() for _ in range(4))
    symmetric, symmetric_too = (
        PoisonedSymmetricScratch(SCRATCH_BYTES, context, device) for _ in range(2)
    )
    scratch, gather_scratch = (PoisonedScratch(SCRATCH_BYTES, device) for _ in range(2))
    push = PeerPushReader(context.rank, pushed, symmetric)
    # Between the prefixes of a story.
    peer_reader.push_is_faster = lambda remote: remote >= 2 * spec.latent.page_bytes
    pull_or_push = PeerReader(
        PeerPullReader(context.rank, either),
        PeerPushReader(context.rank, either, symmetric_too),
    )

    def by_rows(most_tokens: int | None, some_whole: bool = False) -> Mode:
        pool = shared_pool()
        pull = PeerPullReader(context.rank, pool)
        if not some_whole:
            its_scratch = PoisonedScratch(SCRATCH_BYTES, device)
            rows = SelectedRowsReader(pull, context.size, pool, its_scratch)
            ahead, sparse = ReadAhead(StreamLane(device)), SparseReads(rows, most_tokens)
            return Mode(pool, layout, pull, its_scratch, sparse, ahead)
        written_to = PoisonedSymmetricScratch(SCRATCH_BYTES, context, device)
        reader = PeerReader(pull, PeerPushReader(context.rank, pool, written_to))
        rows = SelectedRowsReader(pull, context.size, pool, written_to)
        turns = count()
        chosen = SparseReads(rows, most_tokens, lambda _plan, _new: next(turns) % 3 > 0)
        return Mode(pool, layout, reader, written_to, chosen, ReadAhead(StreamLane(device)))

    def a_layer_ahead(pushes: bool) -> Mode:
        pool, lane = shared_pool(), StreamLane(device)
        written_to = PoisonedSymmetricScratch(SCRATCH_BYTES, context, device)
        push = PeerPushReader(context.rank, pool, written_to)
        reader = push if pushes else PeerPullReader(context.rank, pool)
        return Mode(pool, layout, reader, written_to, ahead=ReadAhead(lane))

    full_view = FullViewReader(nccl, gathered, gather_scratch)
    return {
        "replicated": Mode(
            replicated,
            CpSharedKVLayout(PAGE_SIZE, 1, 0, physical_pages=replicated_pages),
            LocalReader(),
            PoisonedScratch(SCRATCH_BYTES, device),
        ),
        "pull": Mode(pulled, layout, PeerPullReader(context.rank, pulled), scratch),
        "push": Mode(pushed, layout, push, symmetric),
        "pull or push": Mode(either, layout, pull_or_push, symmetric_too),
        "full view": Mode(gathered, layout, full_view, gather_scratch),
        "pull ahead": a_layer_ahead(pushes=False),
        "push ahead": a_layer_ahead(pushes=True),
        "sparse": by_rows(None),
        "blocks": by_rows(BLOCK_TOKENS),
        "auto": by_rows(BLOCK_TOKENS, some_whole=True),
    }


def check_story(
    context: RankContext,
    formats: list[str],
    physical_pages: int,
    story: list[list[dict[str, Any]]],
    split: str,
    dawdle: bool = False,
    wait_for_peers: bool = True,
) -> dict[str, Any]:
    """Run the batches in every mode; returns how many rows were compared, and which differed."""
    device, spec = gpu_of(context), make_spec(*formats)
    modes = make_modes(context, spec, physical_pages)
    if not wait_for_peers:
        modes = {"push": deafened(modes["push"], late=context.rank == 0)}
    sleeps = random.Random(context.rank)
    locs = (context.size * physical_pages + 1) * PAGE_SIZE
    truth = {
        (kind, layer): torch.zeros(
            locs, spec.format(kind).row_bytes, dtype=torch.uint8, device=device
        )
        for kind in PAGE_KINDS
        for layer in spec.layers(kind)
    }
    compared, selected_rows, wrong = 0, 0, set()

    def wait() -> None:
        if dawdle and sleeps.random() < 0.4:
            torch.cuda._sleep(sleeps.randrange(40_000_000))

    for number, batch in enumerate(story):
        spans = [
            BatchSpan(LogicalPages(np.array(s["pages"], np.int64)), s["prefix_len"], s["new_len"])
            for s in batch
        ]
        with patch.object(index_pieces, "PIECE_TOKENS", BLOCK_PIECE):
            kvs = {
                name: ForwardKV.build(
                    mode.pool, mode.layout, nccl_of(context), mode.reader, spans, split,
                    scratch=mode.scratch, sparse=mode.sparse, ahead=mode.ahead,
                )
                for name, mode in modes.items()
            }  # fmt: skip
        token_locs = [token_places(span).to(device) for span in spans]
        new_locs = torch.cat(
            [torch.zeros(0, dtype=torch.int64, device=device)]
            + [places[span.prefix_len :] for places, span in zip(token_locs, spans, strict=True)]
        )
        seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for layer in range(LAYERS):
            values = new_values(number * LAYERS + layer, len(new_locs), device)
            latent, k_pe, index_k = values.split((LATENT, ROPE, INDEX), dim=1)
            rows: dict[PageKind, torch.Tensor] = {"latent": spec.latent.encode(latent, k_pe)}
            if layer in INDEX_LAYERS:
                rows["index"] = spec.index.encode(index_k)
            for kind, encoded in rows.items():
                truth[kind, layer][new_locs] = encoded
            for name, kv in kvs.items():
                mine = kv.token_indices
                wait()
                kv.store(
                    layer, latent[mine], k_pe[mine], index_k[mine] if "index" in rows else None
                )
                wait()
                for request, places in zip(kv.requests, token_locs, strict=True):
                    for kind in rows:
                        pages = modes[name].source(kind, layer)
                        if pages is not None:
                            held = spec.format(kind).gather_rows(pages, request.slots)
                            seen.append((f"{name} {kind}", held, truth[kind, layer][places]))
                if modes[name].as_a_model:
                    of_layer = {kind: truth[kind, layer] for kind in rows}
                    for where, got, expected in as_a_model(kv, spec, layer, token_locs, of_layer):
                        seen.append((f"{name} {where}", got, expected))
                if name == "pull":
                    where, got, expected = select(
                        context, modes[name], spans, kv, layer, rows["latent"], token_locs,
                        truth["latent", layer],
                    )  # fmt: skip
                    seen.append((where, got, expected))
                    selected_rows += len(got)
        torch.cuda.synchronize()
        for where, got, expected in seen:
            compared += len(got)
            if not torch.equal(got, expected):
                wrong.add(where)
    pages = {name: getattr(mode.reader, "pages_read", 0) for name, mode in modes.items()}
    return {"compared": compared, "selected": selected_rows, "wrong": sorted(wrong), "pages": pages}


def deafened(mode: Mode, late: bool) -> Mode:
    """A push that waits for nobody, and on one rank comes late."""
    reader = mode.reader
    assert isinstance(reader, PeerPushReader)
    read = reader.read

    def read_late(*arguments: Any) -> None:
        torch.cuda._sleep(30_000_000 if late else 1)
        read(*arguments)

    reader._buffer.barrier = lambda: None
    reader.read = read_late
    return mode


def as_a_model(
    kv: ForwardKV,
    spec: KVPoolSpec,
    layer: int,
    token_locs: list[torch.Tensor],
    truth: dict[PageKind, torch.Tensor],
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Index K piece by piece, and all latent KV as if tokens had selected it: got, and expected."""
    if "index" in truth:
        seen = [0] * len(token_locs)
        for piece in kv.index_pieces(layer):
            start, seen[piece.request] = seen[piece.request], piece.start + len(piece.keys)
            assert start == piece.start
            rows = truth["index"][token_locs[piece.request][start : seen[piece.request]]]
            yield "index", piece.keys, spec.index.decode(rows, torch.float32)
        last = [0 if r.stop == r.start else int(kv.positions[r.stop - 1]) + 1 for r in kv.requests]
        yield "index keys seen", torch.tensor(seen), torch.tensor(last)
    for request, places in zip(kv.requests, token_locs, strict=True):
        slots = request.slots
        selected = torch.stack([slots, torch.full_like(slots, -1), slots.flip(0)], dim=1)
        brought = 0
        for part, found in kv.bring(layer, selected):
            assert part.start == brought
            brought = part.stop
            got = torch.cat(kv.latent(layer, found[:, [0, 2]]), dim=2)
            wanted = truth["latent"][torch.stack([places, places.flip(0)], dim=1)[part]]
            expected = torch.cat(spec.latent.decode(wanted.flatten(0, 1), torch.float32), dim=1)
            yield "latent", got.flatten(0, 1), expected
            yield "padding", found[:, 1], torch.full_like(found[:, 1], -1)
        assert brought == len(slots)


def select(
    context: RankContext,
    mode: Mode,
    spans: list[BatchSpan],
    kv: ForwardKV,
    layer: int,
    chunk_rows: torch.Tensor,
    token_locs: list[torch.Tensor],
    truth: torch.Tensor,
) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Some slots of the batch, as top-k indices: their rows, and what they should be."""
    device, plan = truth.device, ReadPlan.build(mode.layout, spans)
    assert isinstance(mode.reader, PeerPullReader)
    reader = SelectedRowsReader(
        mode.reader, context.size, mode.pool, PoisonedScratch(SCRATCH_BYTES, device)
    )
    slots = torch.cat([request.slots for request in kv.requests])
    places = torch.cat(token_locs)
    generator = torch.Generator().manual_seed(layer + 100 * context.rank)
    tokens, k = 5, 12
    reader.begin(plan, tokens * k)
    if len(slots) == 0:
        return "selected", torch.empty(0), torch.empty(0)
    chosen = torch.randint(-2, len(slots), (tokens, k), generator=generator).to(device)
    topk = torch.where(chosen < 0, -1, slots[chosen.clamp(min=0)]).int()
    rows, found = reader.read(layer, topk, chunk_rows)
    named = chosen >= 0
    assert (found[~named] == -1).all()
    return "selected", rows[found[named].long()], truth[places[chosen[named]]]


def new_values(seed: int, tokens: int, device: torch.device) -> torch.Tensor:
    """bf16[tokens, *]: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    width = LATENT + ROPE + INDEX
    return torch.randn(tokens, width, generator=generator).bfloat16().to(device)


def token_places(span: BatchSpan) -> torch.Tensor:
    """i64[total_len]: each token's loc."""
    token = np.arange(span.total_len)
    pages = np.asarray(span.logical_pages)
    return torch.from_numpy(pages[token // PAGE_SIZE] * PAGE_SIZE + token % PAGE_SIZE)


def check_in_place(context: RankContext) -> dict[str, Any]:
    """Each rank reads what the others wrote, where they wrote it."""
    device = gpu_of(context)
    assert why_not_mapped(context.process_group, device) is None
    buffer = gpu_buffer(1 << 20, context.process_group, device)
    assert isinstance(buffer, SymmetricBuffer)
    zero_before = not buffer.tensor.any()
    torch.cuda._sleep(50_000_000 * context.rank)  # the barrier must wait for it
    buffer.tensor.fill_(context.rank + 1)
    buffer.barrier()
    seen = [int(buffer.peer(rank)[12345]) for rank in range(context.size)]
    own = buffer.peer_distances_bytes[context.rank]
    return {"zero_before": zero_before, "seen": seen, "own_distance": own}


def check_fallback(context: RankContext, log: str) -> dict[str, Any]:
    """Both ranks on one GPU cannot map each other as peers: a private buffer, said once."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    logging.basicConfig(filename=f"{log}-{context.rank}", force=True)
    buffer = gpu_buffer(4096, context.process_group, device)
    logging.shutdown()
    return {
        "kind": type(buffer).__name__,
        "on_gpu": buffer.tensor.is_cuda,
        "log": Path(f"{log}-{context.rank}").read_text(),
    }

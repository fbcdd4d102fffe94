"""What the tests of the reads run on each rank: pools of each mode, fed with the same batches."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch

from cp_shared_kv.layout.pages import LogicalPages, PhysicalPages
from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.reads import index_pieces
from cp_shared_kv.reads.forward_kv import BatchSpan, ForwardKV, LocalSpan
from cp_shared_kv.reads.group import CPGroup
from cp_shared_kv.testing.bitwise import assert_bitwise_equal, first_difference
from cp_shared_kv.testing.rank_process import RankContext

sys.path.append(str(Path(__file__).parent))  # a rank loads this file alone, by its path

from kv_modes import BLOCK_PIECE, NUM_LAYERS, Mode, Shape, make_modes
from kv_truth import Truth


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

    pool.write = write_late  # type: ignore[method-assign]
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

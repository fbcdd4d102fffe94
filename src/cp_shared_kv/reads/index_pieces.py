"""Index K in pieces: of which pages each block of a batch's prefixes is, and where its keys lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.memory.device_copy import to_device
from cp_shared_kv.reads.piece_size import PIECE_TOKENS
from cp_shared_kv.reads.plan import BatchSpan, PagesByOwner, ReadPlan, token_slots


@dataclass(frozen=True)
class IndexPiece:
    """Consecutive positions of one request, whose keys are in scratch together."""

    request: int
    start: int
    """The first position, a multiple of PIECE_TOKENS."""
    slots: torch.Tensor
    """i64[n]: where the key of each lies."""


@dataclass(frozen=True)
class IndexBlock:
    """What is read at once: pages of prefixes, and the pieces that are complete with them."""

    pages: PagesByOwner
    pieces: tuple[IndexPiece, ...]


@dataclass(frozen=True)
class IndexPlan:
    """All index K of a batch, in blocks. Every rank of the group has the same ones.

    The slots of a block are those of scratch: room for the pages of any block, then the chunk.
    """

    blocks: tuple[IndexBlock, ...]
    room_pages: int
    chunk_slots: torch.Tensor
    """i64[T]: the slots of the batch's new tokens, in each block alike."""

    @classmethod
    def build(
        cls,
        layout: CpSharedKVLayout,
        requests: Sequence[BatchSpan],
        plan: ReadPlan,
        most_pages: int | None = None,
    ) -> IndexPlan:
        """One block, with the plan's own tensors wherever they are; or blocks in host memory, of
        at most `most_pages`, which must have room for PIECE_TOKENS that begin inside a page."""
        if most_pages is None or len(plan.logical_pages) <= most_pages:
            pieces = tuple(IndexPiece(r, 0, slots) for r, slots in enumerate(plan.request_slots))
            return cls((IndexBlock(plan, pieces),), len(plan.logical_pages), plan.chunk_slots)
        chunk_slots = most_pages * layout.page_size + np.arange(len(plan.new_locs))
        blocks = tuple(
            _block(layout, requests, stretches, chunk_slots)
            for stretches in _packed(requests, layout.page_size, most_pages)
        )
        return cls(blocks, most_pages, torch.from_numpy(chunk_slots))

    def to(self, device: torch.device) -> IndexPlan:
        """The plan with its tensors in that device's memory; the host does not wait."""
        return IndexPlan(
            tuple(
                IndexBlock(
                    block.pages.to(device),
                    tuple(
                        IndexPiece(p.request, p.start, to_device(p.slots, device))
                        for p in block.pieces
                    ),
                )
                for block in self.blocks
            ),
            self.room_pages,
            to_device(self.chunk_slots, device),
        )


@dataclass
class _Stretch:
    """Positions [start, stop) of a request."""

    request: int
    start: int
    stop: int


def _packed(
    requests: Sequence[BatchSpan], page_size: int, most_pages: int
) -> Iterator[list[_Stretch]]:
    """Stretches for each block in turn, in the order of requests and positions."""
    block: list[_Stretch] = []
    pages_left = most_pages
    for number, request in enumerate(requests):
        for start in range(0, request.total_len, PIECE_TOKENS):
            stop = min(start + PIECE_TOKENS, request.total_len)
            first, last = _prefix_page_range(request, start, stop, page_size)
            if last - first > pages_left:
                yield block
                block, pages_left = [], most_pages
            pages_left -= last - first
            if block and block[-1].request == number:
                block[-1].stop = stop
            else:
                block.append(_Stretch(number, start, stop))
    if block:
        yield block


def _prefix_page_range(
    request: BatchSpan, start: int, stop: int, page_size: int
) -> tuple[int, int]:
    """Of its pages, those that hold prefix tokens among positions start..stop-1."""
    stop = min(stop, request.prefix_len)
    return (start // page_size, -(-stop // page_size)) if start < stop else (0, 0)


def _block(
    layout: CpSharedKVLayout,
    requests: Sequence[BatchSpan],
    stretches: Sequence[_Stretch],
    chunk_slots: npt.NDArray[np.int64],
) -> IndexBlock:
    page_size = layout.page_size
    parts = [
        requests[s.request].logical_pages[
            slice(*_prefix_page_range(requests[s.request], s.start, s.stop, page_size))
        ]
        for s in stretches
    ]
    pages = PagesByOwner.of(layout, np.concatenate(parts))
    chunk_starts = np.cumsum([0, *(request.new_len for request in requests)])
    pieces: list[IndexPiece] = []
    for stretch, part in zip(stretches, parts, strict=True):
        prefix_len = requests[stretch.request].prefix_len
        origin = stretch.start - stretch.start % page_size  # of the first page of the part
        in_prefix = max(stretch.start, min(stretch.stop, prefix_len))
        old = token_slots(
            pages.scratch_places(part), stretch.start - origin, in_prefix - origin, page_size
        )
        shift = int(chunk_starts[stretch.request]) - prefix_len
        new = chunk_slots[
            shift + max(stretch.start, prefix_len) : shift + max(stretch.stop, prefix_len)
        ]
        pieces.append(
            IndexPiece(stretch.request, stretch.start, torch.from_numpy(np.append(old, new)))
        )
    return IndexBlock(pages, tuple(pieces))

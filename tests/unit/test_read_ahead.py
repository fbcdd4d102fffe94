"""Layers that are read ahead: in which order, into which scratch, and for which batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch

from cp_shared_kv.layout.ownership import CpSharedKVLayout
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.reads.plan import BatchSpan, PagesByOwner, ReadPlan
from cp_shared_kv.reads.prefix_reader import PrefixReader
from cp_shared_kv.reads.read_ahead import LayerPages, ReadAhead
from cp_shared_kv.testing.lanes import EagerLane, LateLane

LAYERS = (0, 2, 3, 7)
PAGE_SIZE, PAGE_BYTES = 4, 8


def make_plan(prefix_pages: int) -> ReadPlan:
    pages = LogicalPages(np.arange(1, prefix_pages + 2))
    span = BatchSpan(pages, prefix_pages * PAGE_SIZE, 1)
    return ReadPlan.build(CpSharedKVLayout(PAGE_SIZE, 2, 0), [span])


class Reader:
    """Fills scratch with the number of the layer, and notes what happens."""

    pages_read = 0
    bytes_read = 0

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, plan: ReadPlan) -> None:
        raise AssertionError("the forward has begun it")

    def read(self, kind: PageKind, layer: int, pages: PagesByOwner, scratch: torch.Tensor) -> None:
        self.events.append(f"read {layer}")
        scratch.fill_(layer)


class NotedLane:
    """Says when the forward starts a read, and when it waits for it."""

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self._number = 0

    def start(self, read: Callable[[], None]) -> Callable[[], None]:
        number = self._number = self._number + 1
        read()
        return lambda: self._events.append(f"wait {number}")


def layer_pages(reader: Reader, lane: object) -> LayerPages:
    taken = torch.zeros(1 if lane is None else 2, 3, PAGE_BYTES, dtype=torch.uint8)
    return LayerPages(
        "latent", LAYERS, make_plan(3), cast(PrefixReader, reader), taken, cast("EagerLane", lane)
    )


def test_the_next_layer_is_started_when_one_is_there() -> None:
    reader = Reader()
    pages = layer_pages(reader, NotedLane(reader.events))
    for layer in LAYERS:
        pages.read(layer)
        reader.events.append(f"compute {layer}")
    assert reader.events == [
        *("read 0", "wait 1", "read 2", "compute 0"),
        *("wait 2", "read 3", "compute 2"),
        *("wait 3", "read 7", "compute 3"),
        *("wait 4", "compute 7"),
    ]


@pytest.mark.parametrize("lane", [None, EagerLane(), LateLane()])
def test_a_layer_in_use_is_not_overwritten_however_early_or_late_the_next_comes(
    lane: object,
) -> None:
    reader = Reader()
    pages = layer_pages(reader, lane)
    for layer in LAYERS:
        scratch = pages.read(layer)
        assert scratch.shape == (3, PAGE_BYTES)
        assert (scratch == layer).all()
    assert reader.events == [f"read {layer}" for layer in LAYERS]


def test_a_batch_without_prefix_or_with_too_long_a_one_is_not_read_ahead() -> None:
    lane = EagerLane()
    assert ReadAhead(lane, 3).lane_for(make_plan(3)) is lane
    assert ReadAhead(lane, 3).lane_for(make_plan(4)) is None
    assert ReadAhead(lane).lane_for(make_plan(4)) is lane
    assert ReadAhead(lane).lane_for(make_plan(0)) is None

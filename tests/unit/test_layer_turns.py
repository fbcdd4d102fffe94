"""One layer in use and the next one under way: what is read when, and into which view."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from cp_shared_kv.memory.page_format import PAGE_KINDS, PageKind
from cp_shared_kv.reads.layer_turns import LayerTurns
from cp_shared_kv.reads.plan import PagesByOwner, ReadPlan
from cp_shared_kv.reads.prefix_reader import PrefixReader

PLAN = cast(ReadPlan, object())
LAYERS = 3


class WritesTheLayer:
    """A reader that fills scratch with the number of the layer, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.begun = 0
        self.pages_read = self.bytes_read = 0

    def begin(self, plan: ReadPlan) -> None:
        self.begun += 1

    def read(self, kind: PageKind, layer: int, pages: PagesByOwner, scratch: torch.Tensor) -> None:
        assert pages is PLAN
        self.asked.append((kind, layer))
        scratch.fill_(layer)


def views(count: int) -> dict[PageKind, list[torch.Tensor]]:
    return {
        kind: [torch.full((2, 8), 99, dtype=torch.uint8) for _ in range(count)]
        for kind in PAGE_KINDS
    }


@pytest.mark.parametrize("in_scratch", [1, 2])
def test_each_layer_is_read_once_and_found_in_its_view(in_scratch: int) -> None:
    reader = WritesTheLayer()
    turns = LayerTurns(cast(PrefixReader, reader), LAYERS)
    turns.begin(PLAN, views(in_scratch))
    assert turns.current("latent") is None

    for layer in range(LAYERS):
        for kind in PAGE_KINDS:
            turns.bring(kind, layer)
            turns.bring(kind, layer)
            assert turns.holds(kind, layer)
            assert (turns.view(kind, layer) == layer).all()

    assert sorted(reader.asked) == sorted(
        (kind, layer) for kind in PAGE_KINDS for layer in range(LAYERS)
    )
    assert reader.begun == 1


def test_the_next_layer_is_under_way_while_one_is_in_use() -> None:
    reader = WritesTheLayer()
    turns = LayerTurns(cast(PrefixReader, reader), LAYERS)
    turns.begin(PLAN, views(2))

    turns.bring("latent", 0)
    assert reader.asked == [("latent", 0), ("latent", 1)]
    assert (turns.view("latent", 0) == 0).all()
    turns.bring("latent", 1)
    assert reader.asked[2:] == [("latent", 2)]
    turns.bring("latent", 2)
    assert len(reader.asked) == 3


def test_what_a_forward_that_was_given_up_had_read_is_not_taken_for_the_next_ones() -> None:
    reader = WritesTheLayer()
    turns = LayerTurns(cast(PrefixReader, reader), LAYERS)
    turns.begin(PLAN, views(2))
    turns.bring("index", 0)

    turns.begin(PLAN, views(2))
    turns.bring("index", 1)
    assert reader.asked == [("index", 0), ("index", 1), ("index", 1), ("index", 2)]


def test_a_layer_that_was_not_begun_is_not_held() -> None:
    turns = LayerTurns(cast(PrefixReader, WritesTheLayer()), LAYERS)
    assert not turns.holds("latent", 0)
    with pytest.raises(AssertionError, match="begin comes first"):
        turns.bring("latent", 0)

"""Pages of the next layer on their way while the layer before is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.reads.plan import PagesByOwner
from cp_shared_kv.reads.prefix_reader import PrefixReader


class Lane(Protocol):
    """Where reads run beside a forward pass, one after the other."""

    def start(self, read: Callable[[], None]) -> Callable[[], None]:
        """Run it after all that the forward has queued so far; the host does not wait.

        Returns what makes the rest of the forward wait for it.
        """
        ...


class StreamLane:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, read: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            read()
            done = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)


@dataclass(frozen=True)
class ReadAhead:
    """To read whole pages a layer ahead, by readers that need no other stream's collectives."""

    lane: Lane
    most_pages: int | None = None
    """Of a prefix, those of which scratch holds two layers; None for any number."""

    def lane_for(self, pages: PagesByOwner) -> Lane | None:
        """The lane for a batch with these pages, if it is read ahead; the same on all ranks."""
        count = len(pages.logical_pages)
        fits = self.most_pages is None or count <= self.most_pages
        return self.lane if count and fits else None


class LayerPages:
    """The pages of one kind of a batch, layer after layer; with a lane the next one is under way.

    What a read overwrites is the layer before the one in use, and a read starts when all ranks
    have exchanged the chunk of the one in use: so no rank needs it any more, also where the owners
    push. Pages of a prefix do not change during a forward, so nothing else has to be waited for.
    """

    def __init__(
        self,
        kind: PageKind,
        layers: Sequence[int],
        pages: PagesByOwner,
        reader: PrefixReader,
        taken: torch.Tensor,
        lane: Lane | None,
    ) -> None:
        """layers: all that are to be read, in order. taken u8[1 or, with a lane, 2, *, page_bytes]:
        scratch."""
        self._kind: PageKind = kind
        self._layers = layers
        self._pages, self._reader, self._lane = pages, reader, lane
        self._taken = taken
        self._turn = 0
        self._arrive: Callable[[], None] | None = None

    def read(self, layer: int) -> torch.Tensor:
        """Scratch u8[*, page_bytes] with the layer's pages, until the layer after the next is read.
        Collective where the reader is; after the exchange of the layer's chunk."""
        assert layer == self._layers[self._turn], "each layer once, in order"
        if self._lane is None:
            self._turn += 1
            self._reader.read(self._kind, layer, self._pages, self._taken[0])
            return self._taken[0]
        arrive = self._arrive or self._start(self._lane)
        arrive()
        in_use = self._taken[self._turn % 2]
        self._turn += 1
        self._arrive = self._start(self._lane) if self._turn < len(self._layers) else None
        return in_use

    def _start(self, lane: Lane) -> Callable[[], None]:
        layer, scratch = self._layers[self._turn], self._taken[self._turn % 2]
        return lane.start(lambda: self._reader.read(self._kind, layer, self._pages, scratch))

"""One layer's prefix in use and, where there is scratch for two, the next one's under way.

Only for readers whose reads no other rank takes part in: those of a next layer are queued earlier
than its own turn, on a stream beside that of the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cp_shared_kv.memory.page_format import PageKind
from cp_shared_kv.reads.plan import ReadPlan
from cp_shared_kv.reads.prefix_reader import PrefixReader


class LayerTurns:
    """Brings the prefix pages of one layer after another into views that take turns.

    The layers of each kind are asked for in ascending order. What is computed with a layer, on the
    current stream, is over before its view is filled again: a read of the layer after next is
    queued behind all that was queued when the next one was asked for.
    """

    def __init__(self, reader: PrefixReader, num_layers: int) -> None:
        """Layers 0 to num_layers - 1 have pages of each kind."""
        self._reader = reader
        self._num_layers = num_layers
        self._plan: ReadPlan | None = None
        self._views: dict[PageKind, Sequence[torch.Tensor]] = {}
        self._current: dict[PageKind, int] = {}
        self._under_way: dict[PageKind, tuple[int, torch.cuda.Event | None]] = {}
        self._beside: torch.cuda.Stream | None = None

    def begin(self, plan: ReadPlan, views: Mapping[PageKind, Sequence[torch.Tensor]]) -> None:
        """Start a forward pass. Collective for some readers.

        views: for each kind one tensor u8[*, page_bytes], or two of the same shape.
        """
        self.end()
        self._reader.begin(plan)
        self._plan = plan
        self._views = dict(views)

    def end(self) -> None:
        """The forward is over, or was given up; no layer is held any more."""
        for _, done in self._under_way.values():
            if done is not None:
                torch.cuda.current_stream().wait_event(done)
        self._plan = None
        self._current.clear()
        self._under_way.clear()

    def holds(self, kind: PageKind, layer: int) -> bool:
        """Whether that layer is the one in use."""
        return self._current.get(kind) == layer

    def current(self, kind: PageKind) -> int | None:
        """The layer in use; None before the first."""
        return self._current.get(kind)

    def view(self, kind: PageKind, layer: int) -> torch.Tensor:
        """Where that layer's pages are, or will be."""
        views = self._views[kind]
        return views[layer % len(views)]

    def bring(self, kind: PageKind, layer: int) -> None:
        """Make the layer's prefix readable on the current stream, and begin with the next one's."""
        plan = self._plan
        assert plan is not None, "begin comes first"
        if self.holds(kind, layer):
            return
        found, done = self._under_way.pop(kind, (None, None))
        if done is not None:
            torch.cuda.current_stream().wait_event(done)
        if found != layer:
            self._reader.read(kind, layer, plan, self.view(kind, layer))
        self._current[kind] = layer
        following = layer + 1
        if len(self._views[kind]) > 1 and following < self._num_layers:
            self._under_way[kind] = (following, self._read_beside(plan, kind, following))

    def _read_beside(self, plan: ReadPlan, kind: PageKind, layer: int) -> torch.cuda.Event | None:
        view = self.view(kind, layer)
        if not view.is_cuda:
            self._reader.read(kind, layer, plan, view)
            return None
        if self._beside is None:
            self._beside = torch.cuda.Stream(view.device)
        # What the view held before is still in use by what has been queued so far, no longer.
        self._beside.wait_stream(torch.cuda.current_stream(view.device))
        with torch.cuda.stream(self._beside):
            self._reader.read(kind, layer, plan, view)
            return self._beside.record_event()

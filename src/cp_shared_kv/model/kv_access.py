"""What a model needs of a KV cache; it knows nothing of pages, ranks or owners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch


class RequestRows(Protocol):
    """The rows of a rank's batch that belong to one request.

    Rows [start, stop) of the rank's tokens are the request's; `slots` (i64) has a slot for every
    position of the request, cached prefix first, then the whole chunk, other ranks' tokens too.
    A row at position p sees slots[0..p].
    """

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def slots(self) -> torch.Tensor: ...


class IndexKeys(Protocol):
    """The index keys of consecutive positions of one request."""

    @property
    def request(self) -> int:
        """Its place among the requests of the batch."""
        ...

    @property
    def start(self) -> int:
        """The position of the first."""
        ...

    def __len__(self) -> int: ...

    @property
    def keys(self) -> torch.Tensor:
        """[n, dI], in the compute dtype; decoded at each access."""
        ...

    @property
    def quantised(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """As they are stored, e4m3 codes u8[n, dI] and a scale of each key fp32[n], copied at each
        access; None where they are not stored so."""
        ...


class KVAccess(Protocol):
    """The KV of one batch on one rank, for the length of one forward."""

    @property
    def requests(self) -> Sequence[RequestRows]:
        """The requests of the batch, their rows disjoint. A request may have no row here."""
        ...

    def store(
        self,
        layer: int,
        latent: torch.Tensor,
        k_pe: torch.Tensor,
        index_k: torch.Tensor | None,
    ) -> None:
        """Hand over this rank's new rows of a layer: [t, r], [t, dr], [t, dI].

        `index_k` is None for a layer that has no indexer; its `index_pieces` are never asked for.
        Collective: every rank calls it for every layer, in order, with t = 0 too. After it the
        whole chunk can be read.
        """
        ...

    def index_pieces(self, layer: int) -> Iterator[IndexKeys]:
        """The stored index keys of all positions that rows here see, each once.

        A request's come by ascending position, in pieces that end at multiples of what the tiles
        of `index_scores` divide. Collective: every rank goes through all of them.
        """
        ...

    def bring(self, layer: int, selected: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Make readable what rows attend to: selected i64[t, k] of slots, below 0 for none.

        Gives some of the rows after the other, and the places i64[n, k] of their slots, below 0
        for none; a part can be read until the next one is given.
        """
        ...

    def latent(self, layer: int, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored (latent [*, r], k_pe [*, dr]) at places i64[*], of any shape."""
        ...

    def latent_rows(
        self, layer: int, places: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]] | None:
        """Rows [*, r + dr] that places i64[t, k] name: in the compute dtype, latent before k_pe.

        Gives some of the t tokens after the other: which, the rows, and their places i64[n, k] in
        those, below 0 for none. None where rows cannot be had so.
        """
        ...

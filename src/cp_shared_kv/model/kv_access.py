"""What a model needs of a KV cache; it knows nothing of pages, ranks or owners."""

from __future__ import annotations

from collections.abc import Sequence
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

        `index_k` is None for a layer that has no indexer; its `index_keys` are never asked for.
        Collective: every rank calls it for every layer, in order, with t = 0 too. After it the
        slots of the whole chunk can be read.
        """
        ...

    def latent(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored (latent [*, r], k_pe [*, dr]) at slots i64[*], of any shape."""
        ...

    def latent_rows(self, layer: int) -> torch.Tensor | None:
        """What slots are indices of: rows [*, r + dr] in the compute dtype, latent and k_pe side
        by side. None where they are not stored so."""
        ...

    def index_keys(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """The stored index keys [*, dI] at slots i64[*]."""
        ...

"""The engine as the server sees it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from cp_shared_kv.engine.api import (
    EngineDescription,
    EngineStats,
    GenerateRequest,
    PoolPages,
    TokenChunk,
    UnitState,
)


class EngineClient(Protocol):
    """One running engine. All methods are for the event loop that the server runs in.

    Every method may raise `EngineRefusal`; with kind `unavailable` the engine as a whole does not
    answer.
    """

    async def describe(self) -> EngineDescription:
        """What does not change during the engine's life."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk]:
        """Output tokens as they come; the chunk with a finish reason is the last.

        Raises `EngineRefusal` at the first step for a request that is not taken, later for one
        that fails on its way. Closing the generator does not end the request: `abort` does.
        """
        ...

    async def abort(self, request_id: str, *, finished: bool = False) -> None:
        """Nobody waits for this request any more: stop it and free its pages.

        `finished`: a stop string ended it, so its client has all that it wanted.

        Comes after the request's generator was closed or cancelled, so the engine must know the
        request until it is over. One that is unknown or over is no error.
        """
        ...

    async def stats(self) -> EngineStats:
        """Figures of this moment."""
        ...

    async def page_maps(self, most_bins: int) -> Sequence[PoolPages]:
        """Pages of every pool whose owner answers, by owner, state and range of physical pages, at
        most `most_bins` ranges an owner."""
        ...

    def units(self) -> Sequence[UnitState]:
        """How each prefill group and decode worker is. Must answer at once."""
        ...

    async def flush_cache(self) -> int:
        """Drop every cached prefix that no request uses; returns how many logical pages of
        prefill groups went."""
        ...

    async def check_invariants(self) -> dict[str, list[str]]:
        """Have every process check its books: what does not add up, by process; empty lists where
        all does."""
        ...

    def healthy(self) -> tuple[bool, str]:
        """Whether requests can be served now, and if not why. Must answer at once."""
        ...

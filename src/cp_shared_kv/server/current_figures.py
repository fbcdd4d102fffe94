"""The engine's figures of this moment for the endpoints that show them; none where it is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cp_shared_kv.engine.api import EngineRefusal, EngineStats, PoolPages
from cp_shared_kv.server.engine_client import EngineClient

ANSWER_SECONDS = 5.0
"""An engine that takes longer to give its figures counts as not answering."""


async def current_stats(client: EngineClient) -> EngineStats | None:
    """Figures of every process that answers, or None if the engine does not."""
    try:
        return await asyncio.wait_for(client.stats(), ANSWER_SECONDS)
    except (EngineRefusal, TimeoutError):
        return None


async def current_page_maps(client: EngineClient, most_bins: int) -> Sequence[PoolPages]:
    """Page maps of the pools whose owners answer, in at most `most_bins` ranges an owner."""
    try:
        return await asyncio.wait_for(client.page_maps(most_bins), ANSWER_SECONDS)
    except (EngineRefusal, TimeoutError):
        return []

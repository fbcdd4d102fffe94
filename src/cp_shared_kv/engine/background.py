"""Tasks that run beside others for as long as those do: their end must not go unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from cp_shared_kv.errors import InvariantError


async def beside(background: Iterable[asyncio.Task[None]], main: Coroutine[Any, Any, None]) -> None:
    """Await `main` while the background tasks run, which end only by being cancelled.

    If one of them ends first, `main` is cancelled and whatever ended that task is raised;
    `InvariantError` if it merely returned.
    """
    background = list(background)
    task = asyncio.create_task(main)
    try:
        await asyncio.wait([task, *background], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            ended = next(other for other in background if other.done())
            ended.result()
            raise InvariantError("a background task ended", value=ended.get_name())
        task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])

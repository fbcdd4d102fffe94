"""Tasks that run beside others: their end is the end of what they ran beside."""

from __future__ import annotations

import asyncio

import pytest

from cp_shared_kv.engine.background import beside
from cp_shared_kv.errors import InvariantError


async def forever() -> None:
    await asyncio.Event().wait()


async def broken() -> None:
    raise RuntimeError("out of its depth")


async def nothing() -> None:
    pass


def test_what_ends_is_awaited_and_the_background_goes_on() -> None:
    async def run() -> None:
        task = asyncio.create_task(forever())
        await beside([task], nothing())
        assert not task.done()
        with pytest.raises(RuntimeError, match="out of its depth"):
            await beside([task], broken())
        assert not task.done()
        task.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("ends", "error", "reason"),
    [
        (broken, RuntimeError, "out of its depth"),
        (nothing, InvariantError, "a background task ended"),
    ],
)
def test_the_end_of_a_background_task_cancels_the_rest_and_tells_why(
    ends: object, error: type[Exception], reason: str
) -> None:
    cancelled: list[bool] = []

    async def main() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run() -> None:
        tasks = [asyncio.create_task(work()) for work in (forever, ends)]
        async with asyncio.timeout(20):
            with pytest.raises(error, match=reason):
                await beside(tasks, main())
        tasks[0].cancel()

    asyncio.run(run())
    assert cancelled == [True]


def test_cancelling_it_cancels_what_it_awaits() -> None:
    async def run() -> None:
        inner = asyncio.Event()

        async def main() -> None:
            try:
                await forever()
            finally:
                inner.set()

        outer = asyncio.create_task(beside([], main()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert inner.is_set()

    asyncio.run(run())

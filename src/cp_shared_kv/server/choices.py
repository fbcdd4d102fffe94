"""All choices of one answer, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from cp_shared_kv.engine.api import TokenChunk
from cp_shared_kv.server.choice_text import ChoiceText, Piece
from cp_shared_kv.server.generation import RequestMeter
from cp_shared_kv.server.openai_schema import Usage

Pieces = AsyncGenerator[tuple[int, Piece]]
"""Index of a choice, and its next piece. The last of each has a finish reason."""


@dataclass
class TokenCounts:
    """Tokens of one answer so far, over all its choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def usage(self) -> Usage:
        """The counts as the API tells them."""
        return Usage.of(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


async def one_choice(
    chunks: AsyncGenerator[TokenChunk],
    text: ChoiceText,
    counts: TokenCounts,
    meter: RequestMeter,
    *,
    first: bool,
) -> AsyncGenerator[Piece]:
    """The pieces of one choice. A stop string ends its request in the engine before it is told."""
    async with aclosing(chunks):
        async for chunk in chunks:
            counts.completion_tokens += len(chunk.token_ids)
            if first:
                # The others find all of the prompt that the first has just had computed.
                counts.cached_tokens = chunk.cached_tokens
            piece = text.take(chunk)
            if piece.finish_reason is not None:
                meter.finished(piece.finish_reason)
                await chunks.aclose()
            yield piece
            if piece.finish_reason is not None:
                return


async def all_choices(choices: Sequence[AsyncGenerator[Piece]]) -> Pieces:
    """The pieces of all choices. The second and later start when the first has its first piece:
    by then the prompt's KV is in the prefix cache.

    The first failure of any ends all. Whoever stops early must close this generator, which closes
    those of the choices.
    """
    first, *others = choices
    async with aclosing(first):
        yield 0, await anext(first)
        if not others:
            async for piece in first:
                yield 0, piece
            return
        queue: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(_pump(index, choice, queue)) for index, choice in enumerate(choices)
        ]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int,
    choice: AsyncGenerator[Piece],
    queue: asyncio.Queue[tuple[int, Piece] | Exception | None],
) -> None:
    try:
        async with aclosing(choice):
            async for piece in choice:
                queue.put_nowait((index, piece))
    except Exception as error:  # whatever it is, it is the answer's failure
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)

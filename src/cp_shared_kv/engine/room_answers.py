"""The answers of one room, put in order: from what its processes say to chunks of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable

from cp_shared_kv.engine.api import EngineRefusal, Outcome, TokenChunk
from cp_shared_kv.engine.client_room import ClientRoom, GoesElsewhere, Lost, logprobs_of
from cp_shared_kv.engine.messages import Admitted, RoomRefused, Tokens


async def token_chunks(
    room: ClientRoom, outcomes: Counter[Outcome], on_tokens: Callable[[], None]
) -> AsyncGenerator[TokenChunk, None]:
    """The chunks of `room` up to the last; how it ended is counted in `outcomes`.

    `on_tokens` is called as tokens come. GoesElsewhere for a room that can begin again on
    another route, EngineRefusal for one that was refused or failed.
    """
    # Tokens come from decode and the cached count from prefill, on links without a common
    # order: the first tokens wait for the count.
    cached: int | None = None
    early: list[Tokens] = []
    while True:
        message = await room.inbox.get()
        match message:
            case Lost() | RoomRefused(kind="unavailable"):
                if not room.delivered:
                    raise GoesElsewhere(message.reason)
                outcomes["failed"] += 1
                raise EngineRefusal(message.reason, kind="failed")
            case RoomRefused():
                refused = message.kind in ("too_long", "invalid", "overloaded")
                outcomes["refused" if refused else "failed"] += 1
                raise EngineRefusal(message.reason, kind=message.kind)
            case Admitted():
                cached = message.cached_tokens
            case Tokens():
                on_tokens()
                early.append(message)
        if cached is None:
            continue
        for tokens in early:
            if tokens.finish_reason is not None:
                aborted = tokens.finish_reason == "abort"
                outcomes["aborted" if aborted else "finished"] += 1
            room.delivered = True
            yield TokenChunk(tokens.token_ids, tokens.finish_reason, cached, logprobs_of(tokens))
            if tokens.finish_reason is not None:
                return
        early.clear()

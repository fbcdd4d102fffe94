"""One try of one request, as the client of the engine keeps it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from cp_shared_kv.engine.api import TokenLogprobs
from cp_shared_kv.engine.messages import Admitted, RoomRefused, Tokens
from cp_shared_kv.engine.router import Route


@dataclass(frozen=True)
class Lost:
    """A process on the request's route is gone, or was when the request came there."""

    reason: str


@dataclass
class ClientRoom:
    """Where a request went, and what has come back and nobody has taken yet."""

    route: Route
    admitted: bool = False
    delivered: bool = False
    """Some of its output has gone to the caller: it cannot begin again elsewhere."""
    inbox: asyncio.Queue[Tokens | Admitted | RoomRefused | Lost] = field(
        default_factory=asyncio.Queue[Tokens | Admitted | RoomRefused | Lost]
    )


class GoesElsewhere(Exception):  # noqa: N818  (it never leaves the client)
    """A request that can begin again on another route: its caller has had nothing of it."""


def logprobs_of(tokens: Tokens) -> list[TokenLogprobs] | None:
    """What the front end sees of a message's log-probabilities."""
    if tokens.logprobs is None:
        return None
    told = zip(tokens.token_ids, tokens.logprobs, strict=True)
    return [TokenLogprobs(token_id, one.logprob, one.top) for token_id, one in told]

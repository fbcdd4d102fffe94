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
    cached_tokens: int = 0
    _counted: bool = False
    _early: list[Tokens] = field(default_factory=list[Tokens])

    def in_order(self, message: Admitted | Tokens) -> list[Tokens]:
        """What can go to the caller now.

        Tokens come from decode and the cached count from prefill, on links without a common order:
        the first tokens wait for the count.
        """
        if isinstance(message, Admitted):
            self.cached_tokens, self._counted = message.cached_tokens, True
        else:
            self._early.append(message)
        if not self._counted:
            return []
        ready, self._early = self._early, []
        return ready


class GoesElsewhere(Exception):  # noqa: N818  (it never leaves the client)
    """A request that can begin again on another route: its caller has had nothing of it."""


def logprobs_of(tokens: Tokens) -> list[TokenLogprobs] | None:
    """What the front end sees of a message's log-probabilities."""
    if tokens.logprobs is None:
        return None
    told = zip(tokens.token_ids, tokens.logprobs, strict=True)
    return [TokenLogprobs(token_id, one.logprob, one.top) for token_id, one in told]

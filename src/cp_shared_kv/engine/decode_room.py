"""One request at decode, and the prefill group that it comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.sampling.sampler import SampledToken
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.transfer.decode_session import DecodeSession
from cp_shared_kv.transfer.messages import Offer


@dataclass(frozen=True, eq=False)
class PrefillPeer:
    """One life of a prefill group, and how to reach its controller and its ranks."""

    life: Life
    epoch: int
    to_controller: Callable[[msgspec.Struct], None]
    to_rank: Callable[[int, msgspec.Struct], None]


@dataclass
class DecodeRoom:
    """One request at decode, from its offer to its last token."""

    peer: PrefillPeer
    offer: Offer
    prompt_tokens: int
    sampling: SamplingState
    logical_pages: LogicalPages | None = None
    session: DecodeSession | None = None
    first_token: SampledToken | None = None
    stopped: bool = False
    """Somebody wants it no more: its failure is nobody's fault."""
    generated: list[int] = field(default_factory=list[int])

    @property
    def stored_tokens(self) -> int:
        """Tokens whose KV is in the pool: not the last generated one, no step followed it."""
        return self.prompt_tokens + len(self.generated) - 1

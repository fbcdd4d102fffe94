"""One request at decode, and the forward pass over all that run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from cp_shared_kv.engine.batch import Batch, BatchRequest
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.sampling.sampler import SampledToken
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.transfer.codec import pack_int64
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


def decode_batch(
    rooms: Mapping[int, DecodeRoom], page_size: int, *, epoch: int, batch_id: int
) -> Batch:
    """One new token for each of these rooms, which run."""
    parts: list[BatchRequest] = []
    tokens: list[int] = []
    for name, room in rooms.items():
        assert room.logical_pages is not None
        pages = room.logical_pages[: room.stored_tokens // page_size + 1]
        parts.append(
            BatchRequest(
                room=name,
                prefix_tokens=room.stored_tokens,
                new_tokens=1,
                logical_pages=pack_int64(pages),
                last=True,
            )
        )
        tokens.append(room.generated[-1])
    return Batch(
        epoch=epoch,
        batch_id=batch_id,
        token_ids=pack_int64(np.asarray(tokens, dtype=np.int64)),
        requests=parts,
    )

"""One request as the prefill controller sees it: where it is on its way to decode."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from cp_shared_kv.engine.pairing import DecodePeer
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.transfer.messages import OpenRoom, SamplingParams


class Stage(Enum):
    """The stages of a request, in order."""

    OFFERED = "offered"
    """Decode has been asked to set pages aside."""
    RESERVED = "reserved"
    """Decode's pages are set aside; the request waits for room in the prefill pool."""
    PREFILLING = "prefilling"
    """Its pages are drawn; chunks are being computed."""
    SENDING = "sending"
    """Every chunk is computed; some rank has not concluded its transfer."""


@dataclass
class PrefillRequest:
    """A prompt, its progress, and what is left to conclude. Owned by the scheduler."""

    room: int
    decode: DecodePeer
    token_ids: npt.NDArray[np.int64]
    max_tokens: int
    sampling: SamplingParams
    page_keys: npt.NDArray[np.void]
    """One opaque value for each full page of the prompt."""
    stage: Stage = Stage.OFFERED
    reservation: OpenRoom | None = None
    logical_pages: LogicalPages | None = None
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens whose KV is in the pool, the cached prefix included."""
    has_waited: bool = False
    """It has let a batch pass that computed most of what it lacks."""
    next_position: int = 0
    """First page position of the request that no chunk has sent."""
    next_chunk: int = 0
    concluded_ranks: set[int] = field(default_factory=set[int])
    failure: str | None = None
    without_numbers: bool = False
    """The row that was to choose its first token held NaN or infinity."""
    answered: bool = False
    """The server has been told that it ends here."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.token_ids)

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens still to compute."""
        return self.prompt_tokens - self.computed_tokens

"""The sizes of a run, which every process must agree on. sizing.py works them out."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.memory.logical_pool import LogicalPool

Tokens = Annotated[int, Meta(ge=0, le=1 << 50)]
Size = Annotated[int, Meta(ge=0, le=1 << 60)]


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the pools and what fits them. Logical figures are of the whole group."""

    page_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    cp_size: Annotated[int, Meta(ge=1, le=4096)]
    shared: bool
    physical_tokens_per_rank: Tokens
    decode_tokens: Tokens
    context_length: Tokens
    scratch_limit_bytes: Size
    max_prefix_pages: Tokens
    """Most prefix pages of one batch, each counted once, that scratch holds."""
    kv_scratch_tokens: Tokens | None = None
    """Prefix tokens of one layer that scratch holds where they may be read in blocks; where GPUs
    read a layer ahead, of two layers."""
    pool_bytes_per_rank: Size
    decode_pool_bytes: Size

    @property
    def capacity(self) -> KVCapacity:
        """The prefill group's pool; a replicated group has the capacity of one rank."""
        return KVCapacity.from_tokens(
            self.physical_tokens_per_rank, self.page_size, self.cp_size if self.shared else 1
        )

    @property
    def decode_capacity(self) -> KVCapacity:
        """The decode worker's pool, which it does not share."""
        return KVCapacity.from_tokens(self.decode_tokens, self.page_size, 1)

    def one_rank_pool(self) -> LogicalPool:
        """The pool of one rank alone, for comparison: what a replicated group would have."""
        return LogicalPool(KVCapacity.from_tokens(self.physical_tokens_per_rank, self.page_size, 1))

    @property
    def logical_tokens(self) -> int:
        """Tokens that the prefill group holds."""
        return self.capacity.logical_tokens

    @property
    def longest_prompt_tokens(self) -> int:
        """Most prompt tokens of one request that is to give at least one token."""
        return min(self.logical_tokens, self.decode_tokens - 1, self.context_length - 1)

"""The one message that makes every rank run the same forward pass."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.layout.pages import LogicalPages
from cp_shared_kv.transfer.codec import check_int64, unpack_int64
from cp_shared_kv.transfer.messages import Chunk, Count, Epoch, RoomId


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request's share of a batch: `new_tokens` computed on top of `prefix_tokens`.

    `logical_pages` (int64, transfer/codec.py) hold both. Page positions
    `send_start` to `send_stop` are complete after this chunk and go to decode as `chunk`.
    """

    room: RoomId
    prefix_tokens: Count
    new_tokens: Count
    logical_pages: bytes
    chunk: Chunk = 0
    send_start: Count = 0
    send_stop: Count = 0
    last: bool = False

    def pages(self) -> LogicalPages:
        """The request's logical pages, int64, by position."""
        return LogicalPages(unpack_int64(self.logical_pages))


class Batch(msgspec.Struct, frozen=True, kw_only=True, tag="batch", forbid_unknown_fields=True):
    """A forward pass: the concatenated new tokens of all its requests (int64)."""

    epoch: Epoch
    batch_id: Count
    token_ids: bytes
    requests: list[BatchRequest]

    def tokens(self) -> npt.NDArray[np.int64]:
        """The new tokens of all requests, in request order, int64."""
        return unpack_int64(self.token_ids)

    def validate(self, *, page_size: int, logical_pages: int, vocab_size: int) -> None:
        """Check every length and id against this side's own sizes before any is used.

        Raises `ProtocolError` naming the first field that does not fit.
        """
        try:
            check_int64("token_ids", self.token_ids, at_least=0, at_most=vocab_size - 1)
            rooms = [r.room for r in self.requests]
            if not rooms or len(set(rooms)) < len(rooms):
                raise ValueError(f"rooms {rooms}; allowed: one or more, each once")
            counted = sum(r.new_tokens for r in self.requests)
            if counted != len(self.token_ids) // 8 or any(r.new_tokens < 1 for r in self.requests):
                raise ValueError(f"new_tokens add up to {counted}, with {len(self.tokens())} given")
            for r in self.requests:
                check_int64("logical_pages", r.logical_pages, at_least=1, at_most=logical_pages)
                held = len(r.logical_pages) // 8
                if r.prefix_tokens < 0 or held != -(-(r.prefix_tokens + r.new_tokens) // page_size):
                    raise ValueError(f"{held} pages for {r.prefix_tokens} + {r.new_tokens} tokens")
                if not 0 <= r.send_start <= r.send_stop <= max(held, r.send_start):
                    raise ValueError(f"positions {r.send_start} to {r.send_stop} of {held} pages")
        except ValueError as error:
            raise ProtocolError(f"batch {self.batch_id} is malformed: {error}") from error

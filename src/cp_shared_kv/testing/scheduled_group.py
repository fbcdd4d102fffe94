"""A prefill scheduler whose ranks answer by hand, for the tests of it."""

from __future__ import annotations

import numpy as np

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.pairing import DecodePeer
from cp_shared_kv.engine.request import PrefillRequest
from cp_shared_kv.engine.scheduler import PrefillScheduler
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.memory.page_keys import page_keys
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import OpenRoom, SamplingParams

PAGE_SIZE = 4
DECODE = DecodePeer(Life("decode", 0, 1), 2, send=lambda _message: None)


class Group:
    """A scheduler over two ranks of `physical_pages` each, and the ranks' answers by hand."""

    def __init__(
        self,
        physical_pages: int = 10,
        chunk_tokens: int = 8,
        max_prefix_pages: int = 20,
        *,
        prefix_caching: bool = True,
    ) -> None:
        capacity = KVCapacity(physical_pages, PAGE_SIZE, 2)
        self.pool = LogicalPool(capacity, prefix_caching=prefix_caching)
        self.scheduler = PrefillScheduler(
            self.pool,
            group_ranks=2,
            chunk_tokens=chunk_tokens,
            max_prefix_pages=max_prefix_pages,
            epoch=1,
        )

    def open(self, room: int, tokens: list[int], first_position: int = 0) -> PrefillRequest:
        token_ids = np.array(tokens, np.int64)
        request = PrefillRequest(
            room=room,
            decode=DECODE,
            token_ids=token_ids,
            max_tokens=1,
            sampling=SamplingParams(),
            page_keys=page_keys(token_ids, PAGE_SIZE),
        )
        self.scheduler.submit(request)
        pages = -(-len(tokens) // PAGE_SIZE)
        self.scheduler.reserved(
            OpenRoom(
                epoch=1,
                room=room,
                decode_epoch=2,
                first_position=first_position,
                physical_pages=pack_int64(np.arange(1, 1 + pages - first_position)),
                total_positions=pages,
            )
        )
        return request

    def run(self) -> Batch | None:
        """The next batch, computed."""
        planned = self.scheduler.next_batch()
        if planned is None:
            return None
        self.scheduler.batch_done(planned[0].batch_id)
        return planned[0]

    def finish(self, room: int) -> None:
        for rank in range(2):
            self.scheduler.concluded(room, rank)

    def cache(self, room: int, tokens: list[int]) -> None:
        """Compute a prompt, send it, and keep its pages cached."""
        self.open(room, tokens)
        while self.run():
            pass
        self.finish(room)


def shares(batch: Batch | None) -> list[tuple[int, int, int]]:
    """Room, prefix and new tokens of each request."""
    assert batch is not None
    return [(part.room, part.prefix_tokens, part.new_tokens) for part in batch.requests]


def sends(batch: Batch | None) -> list[tuple[int, int, int, bool]]:
    assert batch is not None
    return [(part.chunk, part.send_start, part.send_stop, part.last) for part in batch.requests]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()

"""A prefill controller whose sends are recorded, and what its neighbours say to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cp_shared_kv.engine.api import RefusalKind
from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    BatchDone,
    Cancel,
    Paired,
    PrefillStats,
    RoomConcluded,
    RoomRefused,
    RoomToken,
    StatsRequest,
    Submit,
)
from cp_shared_kv.engine.pairing import DecodePeer
from cp_shared_kv.engine.prefill import PrefillController
from cp_shared_kv.testing.bare_run_spec import bare_run_spec
from cp_shared_kv.testing.recorded_sends import RecordedSends
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import AbortRoom, Reserve, Withdrawn
from cp_shared_kv.transfer.sampling_params import SamplingParams

EPOCH, DECODE_EPOCH = 100, 200
DECODE = Life("decode", 0, 1)
PAGE_SIZE, CP_SIZE, VOCAB = 4, 2, 50
FROM_DECODE: dict[str, Any] = {"epoch": DECODE_EPOCH, "peer_epoch": EPOCH}
TO_DECODE: dict[str, Any] = {"epoch": EPOCH, "peer_epoch": DECODE_EPOCH}
GONE = "the client went away"


class Controller(RecordedSends):
    """A controller of two ranks of 5 pages each; it sends to `server`, `ranks` and `decode`."""

    def __init__(self, record: Path | None = None, **config: Any) -> None:
        super().__init__(lambda: self.controller.scheduler.check_invariants())
        self.controller = PrefillController(
            bare_run_spec(
                page_size=PAGE_SIZE,
                cp_size=CP_SIZE,
                chunk_tokens=8,
                physical_pages=5,
                decode_tokens=48,
                context_length=44,
                max_prefix_pages=10,
                vocab_size=VOCAB,
                eos_token_id=0,
                record_batches=record,
                **config,
            ),
            epoch=EPOCH,
            to_server=self.to("server"),
            to_ranks=self.to("ranks"),
        )
        self.peer = DecodePeer(DECODE, DECODE_EPOCH, send=self.to("decode"))
        self.controller.paired(self.peer)
        assert self.take() == [("server", Paired(decode=str(DECODE)))]

    def submit(
        self,
        room: int,
        tokens: int = 6,
        max_tokens: int = 3,
        first: int = 1,
        decode: Life = DECODE,
        **sampling: Any,
    ) -> None:
        self.controller.on_server(
            Submit(
                decode=str(decode),
                room=room,
                token_ids=pack_int64(np.arange(first, first + tokens)),
                max_tokens=max_tokens,
                sampling=SamplingParams(**sampling),
            )
        )

    def reserve(self, room: int, pages: int = 2, first_position: int = 0) -> None:
        self.controller.on_decode(
            self.peer,
            Reserve(
                **FROM_DECODE,
                room=room,
                first_position=first_position,
                physical_pages=pack_int64(np.arange(1, 1 + pages)),
            ),
        )

    def start(self, room: int, tokens: int = 6) -> Batch:
        """Bring a room into its first forward pass."""
        self.submit(room, tokens)
        self.reserve(room, -(-tokens // PAGE_SIZE))
        return self.step()

    def step(self) -> Batch:
        assert self.controller.step()
        batch = self.sent[-1][1]
        assert isinstance(batch, Batch)
        return batch

    def done(
        self, batch: Batch, rank: int, *tokens: tuple[int, int], without: Sequence[int] = ()
    ) -> None:
        self.controller.on_rank(
            BatchDone(
                rank=rank,
                batch_id=batch.batch_id,
                tokens=[RoomToken(room=room, token_id=token) for room, token in tokens],
                without_token=list(without),
                scratch_bytes=10 * (rank + 1),
                read_bytes_total=1000 * (rank + 1),
            )
        )

    def all_done(self, batch: Batch) -> None:
        """Every rank has computed a batch that gives no token."""
        for rank in range(CP_SIZE):
            self.done(batch, rank)

    def conclude(self, room: int, rank: int, failure: str | None = None) -> None:
        self.controller.on_rank(
            RoomConcluded(
                rank=rank,
                room=room,
                pages=rank + 1,
                descriptors=3,
                bytes=100 + rank,
                failure=failure,
            )
        )

    def all_conclude(self, room: int, failure: str | None = None) -> None:
        for rank in range(CP_SIZE):
            self.conclude(room, rank, failure)

    def finish(self, batch: Batch, room: int) -> None:
        """One rank after the other has computed the last batch of a room and sent its pages."""
        for rank in range(CP_SIZE):
            self.done(batch, rank)
            self.conclude(room, rank)

    def cancel(self, room: int) -> None:
        self.controller.on_server(Cancel(room=room))

    def stats(self) -> PrefillStats:
        self.controller.on_server(StatsRequest(ticket=5))
        (stats,) = self.taken(PrefillStats)
        return stats


def stop(room: int, reason: str) -> AbortRoom:
    """What ranks and decode are told of a room that is to stop."""
    return AbortRoom(**TO_DECODE, room=room, reason=reason)


def withdrawn(room: int, reason: str) -> Withdrawn:
    """What decode is told of a room that no rank has open."""
    return Withdrawn(**TO_DECODE, room=room, reason=reason)


def refused(room: int, reason: str, kind: RefusalKind = "failed") -> RoomRefused:
    """What the server is told of a room that ends without output."""
    return RoomRefused(room=room, kind=kind, reason=reason)

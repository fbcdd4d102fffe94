"""A decode engine whose sends are recorded, with ranks played by hand and a runner of no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from cp_shared_kv.engine.api import FinishReason
from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.decode import DecodeEngine
from cp_shared_kv.engine.decode_room import PrefillPeer
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import Tokens
from cp_shared_kv.engine.recording import MessageLog
from cp_shared_kv.engine.sampling.sampler import SampledToken, sample_where_numbers
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.engine.verification import Checksums
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.testing.recorded_sends import RecordedSends
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import AbortRoom, Concluded, FirstToken, Offer, Sent, Withdrawn
from cp_shared_kv.transfer.sampling_params import SamplingParams

EPOCH, PREFILL_EPOCH = 200, 100
PAGE_SIZE, CP_SIZE, VOCAB, EOS, POISON = 4, 2, 100, 99, 66
FROM_PREFILL: dict[str, Any] = {"epoch": PREFILL_EPOCH, "peer_epoch": EPOCH}
TO_PREFILL: dict[str, Any] = {"epoch": EPOCH, "peer_epoch": PREFILL_EPOCH}


class NextNumbers:
    """A runner by whose logits the last token plus one is likeliest, and any other as good as 0.

    After `POISON` they are NaN.
    """

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def execute(
        self, batch: Batch, sampling: dict[int, SamplingState]
    ) -> dict[int, SampledToken | None]:
        batch.validate(page_size=PAGE_SIZE, logical_pages=1000, vocab_size=VOCAB)
        self.batches.append(batch)
        rooms = [part.room for part in batch.requests]
        logits = torch.zeros(len(rooms), VOCAB)
        logits[range(len(rooms)), (batch.tokens() + 1).tolist()] = 20.0
        logits[batch.tokens() == POISON, 3] = torch.nan
        chosen = sample_where_numbers(logits, [sampling[room] for room in rooms])
        return dict(zip(rooms, chosen, strict=True))


class Decode(RecordedSends):
    """A decode engine; it sends to `server`, `controller`, `rank 0` and `rank 1`."""

    def __init__(
        self,
        pages: int = 10,
        max_running: int = 8,
        log: Path | None = None,
        checksums: Checksums | None = None,
    ) -> None:
        super().__init__(lambda: self.engine.check_invariants())
        self.runner = NextNumbers()
        self.pool = LogicalPool(KVCapacity(pages, PAGE_SIZE, 1), prefix_caching=False)
        self.engine = DecodeEngine(
            self.pool,
            self.runner,  # type: ignore[arg-type]
            epoch=EPOCH,
            cp_size=CP_SIZE,
            max_running=max_running,
            quarantine_seconds=30.0,
            vocab_size=VOCAB,
            eos_token_ids=frozenset([EOS]),
            to_server=self.to("server"),
            log=None if log is None else MessageLog(log),
            checksums=checksums,
        )
        self.peer = PrefillPeer(
            Life("prefill", 0, 1),
            PREFILL_EPOCH,
            to_controller=self.to("controller"),
            to_rank=lambda rank, message: self.to(f"rank {rank}")(message),
        )

    def offer(self, room: int, tokens: int = 6, max_tokens: int = 4, **sampling: Any) -> None:
        self.engine.on_offer(
            self.peer,
            Offer(
                **FROM_PREFILL,
                room=room,
                token_ids=pack_int64(np.arange(tokens)),
                max_tokens=max_tokens,
                sampling=SamplingParams(**sampling),
            ),
        )

    def first_token(self, room: int, token: int = 10) -> None:
        self.engine.on_first_token(self.peer, FirstToken(**FROM_PREFILL, room=room, token_id=token))

    def send(self, room: int, rank: int, pages: int = 2, checksum: int | None = None) -> None:
        """The rank sends its pages (those with position % 2 == rank) and concludes."""
        positions = np.arange(rank, pages, CP_SIZE)
        self.engine.on_transfer(
            self.peer,
            Sent(
                **FROM_PREFILL,
                room=room,
                rank=rank,
                chunk=0,
                positions=pack_int64(positions),
                descriptors=1,
                nbytes=8,
                checksums=b""
                if checksum is None
                else pack_int64(np.full(len(positions), checksum)),
            ),
        )
        self.engine.on_transfer(self.peer, self.success(room, rank, len(positions)))

    def send_all(self, room: int, pages: int = 2, checksum: int | None = None) -> None:
        """Every rank sends its pages and concludes."""
        for rank in range(CP_SIZE):
            self.send(room, rank, pages, checksum)

    def success(self, room: int, rank: int, positions: int = 1) -> Concluded:
        return Concluded(
            **FROM_PREFILL,
            room=room,
            rank=rank,
            outcome="success",
            quiescent=True,
            sent_chunks=1,
            total_positions=positions,
        )

    def fail(self, room: int, rank: int, quiescent: bool = True) -> None:
        self.engine.on_transfer(
            self.peer,
            Concluded(
                **FROM_PREFILL,
                room=room,
                rank=rank,
                outcome="failed",
                reason="the wire broke",
                quiescent=quiescent,
                sent_chunks=0,
                total_positions=0,
            ),
        )

    def run(
        self, room: int, tokens: int = 6, max_tokens: int = 4, first: int = 10, **sampling: Any
    ) -> None:
        """Bring a room to where it decodes."""
        self.offer(room, tokens, max_tokens, **sampling)
        self.first_token(room, first)
        self.send_all(room, -(-tokens // PAGE_SIZE))
        self.take()

    def steps(self, limit: int = 20) -> list[Tokens]:
        """Decode until nothing runs."""
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.engine.step()
        return self.taken(Tokens)

    @property
    def free_tokens(self) -> int:
        return self.pool.available_pages * PAGE_SIZE


def tokens(room: int, *ids: int, end: FinishReason | None = None) -> Tokens:
    """What the server is told of a room's next tokens."""
    return Tokens(room=room, token_ids=list(ids), finish_reason=end)


def stop(room: int) -> AbortRoom:
    """Prefill's word that a room is to stop."""
    return AbortRoom(**FROM_PREFILL, room=room, reason="the client went away")


def withdraw(room: int) -> Withdrawn:
    """Prefill's word that no rank has a room open."""
    return Withdrawn(**FROM_PREFILL, room=room, reason="the client went away")

"""Decode's side of a replay: it decides nothing, and notices what does not belong to it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from cp_shared_kv.engine.batch import Batch, BatchRequest
from cp_shared_kv.engine.messages import ReplayReady, RoomCovered, StepDone
from cp_shared_kv.engine.replay_decode import POISON, ReplayDecode
from cp_shared_kv.errors import CpkvError, ProtocolError
from cp_shared_kv.memory.buffers import PrivateBuffer
from cp_shared_kv.memory.formats.registry import index_format, latent_format
from cp_shared_kv.memory.pool import KVPool, KVPoolSpec
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import (
    Acknowledged,
    Concluded,
    FirstToken,
    Reserve,
    Sent,
)

EPOCH, PREFILL_EPOCH, ROOM = 200, 100, 7
FROM_RANK: dict[str, Any] = {"epoch": PREFILL_EPOCH, "peer_epoch": EPOCH, "room": ROOM}


class Replay:
    """A replaying decode worker whose sends and forward passes are recorded in order."""

    def __init__(self) -> None:
        spec = KVPoolSpec(
            latent=latent_format("fp32", kv_lora_rank=4, qk_rope_head_dim=2, page_size=4),
            index=index_format("fp32", index_head_dim=2, page_size=4),
            num_layers=1,
            index_layers=(0,),
        )
        self.pool = KVPool(spec, 4, PrivateBuffer(spec.pool_bytes(4)))
        self.pool.buffer.tensor.zero_()
        self.events: list[object] = []
        self.replay = ReplayDecode(
            self.pool,
            self,  # type: ignore[arg-type]
            epoch=EPOCH,
            prefill_epoch=PREFILL_EPOCH,
            cp_size=2,
            to_controller=lambda message: self.events.append(message),
            to_rank=lambda rank, message: self.events.append((rank, message)),
        )

    def execute(self, batch: Batch) -> None:
        self.events.append(batch)

    def take(self) -> list[object]:
        taken, self.events = self.events, []
        return taken

    def reserve(self) -> None:
        """As recorded: with the epochs of the run that is replayed."""
        self.replay.handle(
            Reserve(
                epoch=1,
                peer_epoch=2,
                room=ROOM,
                first_position=0,
                physical_pages=pack_int64(np.array([3, 1, 2])),
            )
        )

    def send(self, rank: int, *positions: int) -> None:
        self.replay.handle(
            Sent(
                **FROM_RANK,
                rank=rank,
                chunk=0,
                positions=pack_int64(np.array(positions, np.int64)),
                descriptors=1,
                nbytes=1,
            )
        )
        self.replay.handle(
            Concluded(
                **FROM_RANK,
                rank=rank,
                outcome="success",
                quiescent=True,
                sent_chunks=1,
                total_positions=len(positions),
            )
        )


def test_the_pool_is_poisoned_before_the_replay_is_ready() -> None:
    replay = Replay()
    assert replay.take() == [ReplayReady()]
    assert replay.pool.buffer.tensor.unique().tolist() == [POISON]


def test_a_room_is_covered_when_every_rank_has_sent_its_part() -> None:
    replay = Replay()
    replay.take()
    replay.reserve()
    assert replay.take() == []
    replay.send(1, 1)
    answer = {"epoch": EPOCH, "peer_epoch": PREFILL_EPOCH, "room": ROOM, "of": "concluded"}
    assert replay.take() == [(1, Acknowledged(**answer, rank=1))]
    replay.send(0, 0, 2)
    assert replay.take() == [(0, Acknowledged(**answer, rank=0)), RoomCovered(room=ROOM)]


def test_a_recorded_step_is_run_before_it_is_reported() -> None:
    replay = Replay()
    replay.take()
    batch = Batch(
        epoch=1,
        batch_id=12,
        token_ids=pack_int64(np.array([5])),
        requests=[
            BatchRequest(
                room=ROOM,
                prefix_tokens=0,
                new_tokens=1,
                logical_pages=pack_int64(np.array([3])),
            )
        ],
    )
    replay.replay.handle(batch)
    assert replay.take() == [batch, StepDone(batch_id=12)]


def test_a_page_that_never_came_ends_the_replay() -> None:
    replay = Replay()
    replay.reserve()
    replay.send(0, 0)
    with pytest.raises(CpkvError, match=r"replayed room failed: .*positions 2.*: 7"):
        replay.send(1, 1)


def test_pages_of_a_room_that_was_not_replayed_are_refused() -> None:
    with pytest.raises(ProtocolError, match="not replayed: 7"):
        Replay().send(0, 0)


def test_pages_of_another_life_are_refused() -> None:
    replay = Replay()
    replay.reserve()
    replay.take()
    stale = Concluded(
        **(FROM_RANK | {"epoch": PREFILL_EPOCH - 1}),
        rank=0,
        outcome="success",
        quiescent=True,
        sent_chunks=0,
        total_positions=0,
    )
    with pytest.raises(ProtocolError, match="another life"):
        replay.replay.handle(stale)
    assert replay.take() == []


@pytest.mark.parametrize(
    "message", [FirstToken(**FROM_RANK, token_id=1), StepDone(batch_id=1)], ids=["token", "step"]
)
def test_what_is_no_part_of_a_replay_is_refused(message: msgspec.Struct) -> None:
    with pytest.raises(ProtocolError, match=f"not part of a replay: {type(message).__name__}"):
        Replay().replay.handle(message)

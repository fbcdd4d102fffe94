"""One rank in one epoch: what it refuses, and what it forgets."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock
from weakref import WeakValueDictionary

import numpy as np
import pytest

from cp_shared_kv.engine import rank_epoch
from cp_shared_kv.engine.batch import Batch, BatchRequest
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.messages import Configure, DisconnectDecode
from cp_shared_kv.engine.rank_epoch import RankEpoch
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import OpenRoom

LIMITS = EngineLimits(
    page_size=4,
    cp_size=2,
    shared=True,
    physical_tokens_per_rank=20,
    decode_tokens=40,
    context_length=40,
    scratch_limit_bytes=1000,
    max_prefix_pages=10,
    pool_bytes_per_rank=0,
    decode_pool_bytes=0,
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"physical_pages": 6}, "pages of a pool than this run has: 6; allowed: 5"),
        ({"shared": False, "physical_pages": 11}, "than this run has: 11; allowed: 10"),
        ({"physical_pages": 1 << 40}, "allowed: 5"),
        ({"scratch_limit_bytes": 1001}, "bytes of scratch than this run has: 1001; allowed: 1000"),
    ],
)
def test_more_memory_than_the_run_has_is_refused_before_any_is_asked_for(
    changes: dict[str, Any], said: str
) -> None:
    values: dict[str, Any] = {
        "epoch": 1,
        "shared": True,
        "physical_pages": 5,
        "kv_read": "pull",
        "scratch_limit_bytes": 1000,
    }
    nothing: Any = None
    spec: Any = SimpleNamespace(limits=LIMITS)
    with pytest.raises(ProtocolError, match=said):
        RankEpoch(
            Configure(**(values | changes)),
            spec,
            nothing,
            nothing,
            nothing,
            nothing,
            nothing,
            to_decode=nothing,
            to_controller=nothing,
        )


class Rank:
    """An epoch whose memory, model and transfers are stand-ins, and the states it has made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states = WeakValueDictionary[int, SamplingState]()
        self.given: list[set[int]] = []
        for part in ("RankPools", "make_reader", "ModelRunner", "TransferSender"):
            monkeypatch.setattr(rank_epoch, part, MagicMock())
        spec, group = MagicMock(limits=LIMITS, vocab_size=50, eos_token_ids=(0,)), MagicMock()
        group.cp_rank, group.cp_size = 0, 2
        configure = Configure(
            epoch=1, shared=True, physical_pages=5, kv_read="pull", scratch_limit_bytes=1000
        )
        self.epoch = RankEpoch(
            configure,
            spec,
            MagicMock(),
            MagicMock(),
            MagicMock(),
            group,
            MagicMock(),
            to_decode=MagicMock(),
            to_controller=MagicMock(),
        )
        monkeypatch.setattr(rank_epoch, "SamplingState", self._make)
        monkeypatch.setattr(rank_epoch, "BatchDone", MagicMock())
        rank_epoch.ModelRunner.return_value.execute = self._execute

    def _make(self, *arguments: Any, **named: Any) -> SamplingState:
        state = SamplingState(*arguments, **named)
        self.states[len(self.states)] = state
        return state

    def _execute(self, _batch: Batch, sampling: Mapping[int, SamplingState]) -> dict[int, None]:
        self.given.append(set(sampling))
        return {}

    def open(self, room: int, decode_epoch: int) -> None:
        self.epoch.open(
            OpenRoom(
                epoch=1,
                room=room,
                decode_epoch=decode_epoch,
                first_position=0,
                physical_pages=pack_int64(np.arange(1, 3)),
                total_positions=2,
            )
        )

    def run(self, room: int, *, last: bool) -> None:
        part = BatchRequest(
            room=room,
            prefix_tokens=4 if last else 0,
            new_tokens=4,
            logical_pages=pack_int64(np.arange(1, 3 if last else 2)),
            chunk=int(last),
            send_start=int(last),
            send_stop=int(last) + 1,
            last=last,
        )
        tokens = pack_int64(np.arange(4))
        self.epoch.run(Batch(epoch=1, batch_id=1, token_ids=tokens, requests=[part]))


def test_a_prompt_whose_decode_worker_died_half_way_leaves_nothing_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank(monkeypatch)
    for room, decode_epoch in ((1, 7), (2, 8)):
        rank.open(room, decode_epoch)
        rank.run(room, last=False)
    assert len(rank.states) == 2
    rank.epoch.decode_dead(DisconnectDecode(decode_epoch=7, reason="killed"))
    assert list(rank.states) == [1]
    rank.run(2, last=True)
    assert rank.given == [{1}, {2}, {2}]
    assert not rank.states

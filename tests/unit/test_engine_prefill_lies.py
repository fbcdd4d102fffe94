"""What a rank or a decode worker cannot mean: the prefill controller believes none of it."""

from __future__ import annotations

import numpy as np
import pytest

from cp_shared_kv.engine.messages import NO_NUMBERS
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.testing.recorded_controller import (
    CP_SIZE,
    DECODE_EPOCH,
    EPOCH,
    PAGE_SIZE,
    TO_DECODE,
    VOCAB,
    Controller,
    refused,
    stop,
)
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import AbortRoom, Declined, FirstToken, Released, Reserve


@pytest.mark.parametrize("rank", [-1, CP_SIZE])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    group = Controller()
    batch = group.start(1)
    with pytest.raises(ProtocolError, match="does not exist"):
        group.done(batch, rank)
    with pytest.raises(ProtocolError, match="does not exist"):
        group.conclude(1, rank)
    for real in range(CP_SIZE):
        group.done(batch, real)
        group.conclude(1, real)
    assert group.controller.scheduler.get(1) is None


def test_a_rank_that_has_done_a_batch_twice_is_refused_and_its_first_word_stands() -> None:
    group = Controller()
    batch = group.start(1, tokens=4)
    group.done(batch, 0, (1, 42))
    group.take()
    for again in ([(1, 42)], [(1, 43)]):
        with pytest.raises(ProtocolError, match="done a batch twice"):
            group.done(batch, 0, *again)
    assert group.take() == []
    group.done(batch, 1)
    assert group.taken(FirstToken) == [FirstToken(**TO_DECODE, room=1, token_id=42)]


@pytest.mark.parametrize(
    "life",
    [{"epoch": DECODE_EPOCH - 1, "peer_epoch": EPOCH}, {"epoch": DECODE_EPOCH, "peer_epoch": 99}],
    ids=["sender", "receiver"],
)
def test_messages_of_another_epoch_are_refused_and_change_nothing(life: dict[str, int]) -> None:
    group = Controller()
    group.submit(1)
    group.take()
    for message in (
        Reserve(**life, room=1, first_position=0, physical_pages=pack_int64(np.arange(1, 3))),
        Declined(**life, room=1, reason="no"),
        AbortRoom(**life, room=1, reason="no"),
        Released(**life, room=1),
    ):
        with pytest.raises(ProtocolError, match=f"another epoch: {type(message).__name__}"):
            group.controller.on_decode(group.peer, message)
    assert group.take() == []
    assert not group.controller.step()
    group.reserve(1)
    assert group.controller.step()


def test_a_conclusion_of_a_room_that_no_rank_has_open_is_refused() -> None:
    group = Controller()
    group.submit(1)
    group.take()
    for stage in ("offered", "reserved"):
        for room in (1, 77):
            with pytest.raises(ProtocolError, match="has not open"):
                group.conclude(room, 0)
            with pytest.raises(ProtocolError, match="has not open"):
                group.conclude(room, 0, "lost")
        if stage == "offered":
            group.reserve(1)
    assert group.take() == []
    assert group.stats().sent_pages_total == [0, 0]


def test_success_before_the_last_chunk_is_refused_and_failure_is_not() -> None:
    group = Controller()
    batch = group.start(1, tokens=12)  # in two chunks
    with pytest.raises(ProtocolError, match="chunks to come"):
        group.conclude(1, 0)
    group.all_done(batch)
    with pytest.raises(ProtocolError, match="chunks to come"):
        group.conclude(1, 0)
    last = group.step()
    group.conclude(1, 0)  # one rank is faster than the word of the other's batch
    with pytest.raises(ProtocolError, match="twice"):
        group.conclude(1, 0)
    for rank in range(CP_SIZE):
        group.done(last, rank, *([(1, 42)] if rank else []))
    group.take()
    group.conclude(1, 1)
    assert group.stats().running == 0
    assert group.stats().sent_pages_total == [1, 2]


def test_a_first_token_that_does_not_exist_fails_its_room_alone() -> None:
    group = Controller()
    for room in (1, 2):
        group.submit(room, tokens=4)
        group.reserve(room, pages=1)
    batch = group.step()
    assert [part.room for part in batch.requests] == [1, 2]
    group.done(batch, 0, (1, VOCAB))
    group.take()
    group.done(batch, 1, (2, VOCAB - 1))
    reason = f"a rank chose token {VOCAB}, which does not exist"
    assert group.take() == [
        ("ranks", stop(1, reason)),
        ("decode", stop(1, reason)),
        ("decode", FirstToken(**TO_DECODE, room=2, token_id=VOCAB - 1)),
    ]


@pytest.mark.parametrize("token_too", [False, True])
def test_a_prompt_whose_logits_are_no_numbers_fails_alone(
    token_too: bool, caplog: pytest.LogCaptureFixture
) -> None:
    group = Controller()
    for room in (1, 2):
        group.submit(room, tokens=4, first=room)
        group.reserve(room, pages=1)
    batch = group.step()
    group.done(batch, 0, without=[1, 99])
    group.take()
    group.done(batch, 1, (2, 7), *([(1, 7)] if token_too else []))
    assert group.take() == [
        ("ranks", stop(1, NO_NUMBERS)),
        ("decode", stop(1, NO_NUMBERS)),
        ("decode", FirstToken(**TO_DECODE, room=2, token_id=7)),
    ]
    for rank in range(CP_SIZE):
        group.conclude(1, rank)
        group.conclude(2, rank)
    assert group.take() == [("server", refused(1, NO_NUMBERS))]
    assert f"room 1: {NO_NUMBERS}" in caplog.text
    assert group.stats().cached_tokens == PAGE_SIZE  # room 2's alone

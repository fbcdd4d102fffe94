"""A prompt's way through the prefill controller, to its first token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.codecs import RECORDED
from cp_shared_kv.engine.messages import Admitted, BatchDone, RoomToken
from cp_shared_kv.engine.recording import read_messages
from cp_shared_kv.testing.recorded_controller import (
    CP_SIZE,
    DECODE_EPOCH,
    EPOCH,
    TO_DECODE,
    Controller,
)
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import FirstToken, Offer, OpenRoom
from cp_shared_kv.transfer.sampling_params import SampledLogprobs, SamplingParams


def test_a_prompt_is_offered_reserved_opened_and_computed_in_that_order() -> None:
    group = Controller()
    group.submit(1, tokens=6, max_tokens=3)
    assert group.take() == [
        (
            "decode",
            Offer(**TO_DECODE, room=1, token_ids=pack_int64(np.arange(1, 7)), max_tokens=3),
        )
    ]
    assert not group.controller.step()  # not before decode has pages for it
    group.reserve(1)
    assert group.take() == []
    assert group.controller.step()
    (to_ranks, opened), (to_server, admitted), (_, batch) = group.take()
    assert to_ranks == "ranks"
    assert opened == OpenRoom(
        epoch=EPOCH,
        room=1,
        decode_epoch=DECODE_EPOCH,
        first_position=0,
        physical_pages=pack_int64(np.arange(1, 3)),
        total_positions=2,
    )
    assert (to_server, admitted) == ("server", Admitted(room=1, cached_tokens=0))
    assert isinstance(batch, Batch)
    assert batch.epoch == EPOCH
    assert not group.controller.step()  # one batch in flight


@pytest.mark.parametrize(
    ("sampling", "prompt"),
    [
        ({}, []),
        ({"temperature": 0.5, "seed": 9, "presence_penalty": 1.0}, []),
        ({"repetition_penalty": 1.5}, [1, 2, 3]),
    ],
)
def test_ranks_hear_how_to_choose_the_first_token_and_the_prompt_only_if_it_matters(
    sampling: dict[str, Any], prompt: list[int]
) -> None:
    group = Controller()
    group.submit(1, tokens=3, **sampling)
    (offer,) = group.taken(Offer)
    group.reserve(1, pages=1)
    group.step()
    (opened,) = group.taken(OpenRoom)
    assert opened.sampling == offer.sampling == SamplingParams(**sampling)
    assert opened.prompt_tokens().tolist() == prompt


def test_the_first_token_is_sent_once_when_every_rank_is_done() -> None:
    group = Controller()
    batch = group.start(1)
    group.take()
    group.done(batch, 1, (1, 42))
    assert group.take() == []
    group.done(batch, 0)
    assert group.take() == [("decode", FirstToken(**TO_DECODE, room=1, token_id=42))]
    group.conclude(1, 0)
    group.conclude(1, 1)
    assert group.take() == []  # the rest is decode's


def test_the_first_token_brings_its_logprobs() -> None:
    group = Controller()
    batch = group.start(1)
    group.done(batch, 0)
    group.take()
    told = SampledLogprobs(logprob=-0.5, top=((3, -0.25),))
    group.controller.on_rank(
        BatchDone(
            rank=1,
            batch_id=batch.batch_id,
            tokens=[RoomToken(room=1, token_id=4, logprobs=told)],
            scratch_bytes=0,
        )
    )
    assert group.taken(FirstToken) == [FirstToken(**TO_DECODE, room=1, token_id=4, logprobs=told)]


def test_a_chunk_that_is_not_the_last_gives_no_token() -> None:
    group = Controller()
    batch = group.start(1, tokens=12)
    group.all_done(batch)
    assert group.taken(FirstToken) == []
    batch = group.step()
    group.done(batch, 0, (1, 9))
    group.done(batch, 1)
    assert group.taken(FirstToken) == [FirstToken(**TO_DECODE, room=1, token_id=9)]


def test_a_room_without_a_token_that_is_not_at_its_end_goes_on() -> None:
    group = Controller()
    batch = group.start(1, tokens=12)
    group.take()
    for rank in range(CP_SIZE):
        group.done(batch, rank, without=[1])
    assert group.take() == []
    assert [part.room for part in group.step().requests] == [1]


def test_the_cached_prefix_is_told_to_the_server() -> None:
    group = Controller()
    batch = group.start(1, tokens=8)
    group.all_done(batch)
    group.start(2, tokens=9)
    assert group.taken(Admitted) == [
        Admitted(room=1, cached_tokens=0),
        Admitted(room=2, cached_tokens=8),
    ]


def test_a_recording_holds_openings_and_batches_in_the_order_of_their_sending(
    tmp_path: Path,
) -> None:
    group = Controller(tmp_path)
    for room in (1, 2):
        group.submit(room, tokens=8, first=10 * room)
        group.reserve(room)
    for _ in range(2):
        batch = group.step()
        group.all_done(batch)
    to_ranks = [message for end, message in group.take() if end == "ranks"]
    assert [type(message) for message in to_ranks] == [OpenRoom, Batch, OpenRoom, Batch]
    recorded = [RECORDED.decode(data) for data in read_messages(tmp_path / "prefill.messages")]
    assert recorded == to_ranks

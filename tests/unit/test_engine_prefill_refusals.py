"""Prompts that the prefill controller refuses, or decode, and reservations that are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cp_shared_kv.engine.messages import RoomRefused, Submit
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.testing.recorded_controller import (
    DECODE,
    FROM_DECODE,
    GONE,
    VOCAB,
    Controller,
    refused,
)
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import Declined, Offer, Reserve, Withdrawn
from cp_shared_kv.transfer.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("tokens", "max_tokens"),
    [(41, 1), (40, 5), (40, 9), (1, 44)],
    ids=["logical capacity", "context", "decode capacity", "output"],
)
def test_what_can_never_fit_is_refused_and_the_next_is_served(tokens: int, max_tokens: int) -> None:
    group = Controller()
    group.submit(1, tokens, max_tokens)
    ((end, refusal),) = group.take()
    assert end == "server"
    assert isinstance(refusal, RoomRefused)
    assert (refusal.room, refusal.kind) == (1, "too_long")
    assert f"{tokens} prompt tokens and {max_tokens} to generate" in refusal.reason
    for limit in ("logical_tokens=40", "decode_tokens=48", "context_length=44"):
        assert limit in refusal.reason
    group.submit(2, tokens=40, max_tokens=4)  # exactly what fits
    assert [type(message) for message in group.taken(Offer)] == [Offer]


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "reason"),
    [
        (pack_int64(np.array([1, VOCAB])), 1, "token_ids runs from 1 to 50; allowed: 0 to 49"),
        (pack_int64(np.array([-1])), 1, "token_ids runs from -1"),
        (b"1234567", 1, "not whole int64 values"),
        (b"", 1, "token_ids is empty"),
        (pack_int64(np.array([1])), 0, "max_tokens is 0; allowed: 1 or more"),
        (pack_int64(np.array([1])), -5, "max_tokens is -5"),
    ],
)
def test_a_malformed_prompt_ends_alone(token_ids: bytes, max_tokens: int, reason: str) -> None:
    group = Controller()
    group.controller.on_server(
        Submit(
            room=1,
            decode=str(DECODE),
            token_ids=token_ids,
            max_tokens=max_tokens,
            sampling=SamplingParams(),
        )
    )
    ((end, refusal),) = group.take()
    assert end == "server"
    assert isinstance(refusal, RoomRefused)
    assert (refusal.room, refusal.kind) == (1, "invalid")
    assert reason in refusal.reason
    assert group.controller.scheduler.get(1) is None


@pytest.mark.parametrize(
    "sampling", [{"stop_token_ids": (VOCAB,)}, {"logit_bias": ((3, 1.0), (VOCAB, 1.0))}]
)
def test_sampling_by_a_token_beyond_the_vocabulary_is_refused_before_anyone_hears_of_it(
    sampling: dict[str, Any],
) -> None:
    group = Controller()
    group.submit(1, **sampling)
    ((end, refusal),) = group.take()
    assert end == "server"
    assert isinstance(refusal, RoomRefused)
    assert refusal.kind == "invalid"
    assert f"{next(iter(sampling))} holds token id {VOCAB}" in refusal.reason


def test_a_prompt_for_a_decode_worker_that_is_not_paired_is_refused_as_unavailable() -> None:
    group = Controller()
    group.submit(1, max_tokens=1, decode=DECODE.next())
    ((end, answer),) = group.take()
    assert end == "server"
    assert isinstance(answer, RoomRefused)
    assert answer.kind == "unavailable"
    assert str(DECODE.next()) in answer.reason


def test_a_full_queue_refuses_the_next_request_and_takes_one_when_there_is_room() -> None:
    group = Controller(max_queued_requests=2)
    group.submit(1)
    group.submit(2)
    group.take()
    group.submit(3)
    ((receiver, refusal),) = group.take()
    assert receiver == "server"
    assert isinstance(refusal, RoomRefused)
    assert (refusal.room, refusal.kind) == (3, "overloaded")
    assert "--max-queued-requests" in refusal.reason
    assert group.controller.scheduler.get(3) is None
    group.cancel(1)
    group.take()
    group.submit(3)
    assert [offer.room for offer in group.taken(Offer)] == [3]


def test_a_room_that_is_open_is_not_harmed_by_a_second_prompt() -> None:
    group = Controller()
    group.submit(1)
    group.take()
    for max_tokens in (3, 0, 1000):
        with pytest.raises(ProtocolError, match="already open: 1"):
            group.submit(1, max_tokens=max_tokens)
    assert group.take() == []


def test_what_decode_declines_is_refused() -> None:
    group = Controller()
    group.submit(1)
    group.take()
    group.controller.on_decode(group.peer, Declined(**FROM_DECODE, room=1, reason="no room, ever"))
    assert ("server", refused(1, "no room, ever")) in group.take()
    assert group.controller.scheduler.get(1) is None


def test_a_room_that_decode_declines_too_late_is_refused_once() -> None:
    group = Controller()
    group.submit(1)
    group.cancel(1)
    group.controller.on_decode(group.peer, Declined(**FROM_DECODE, room=1, reason="no room, ever"))
    assert group.taken(RoomRefused) == [refused(1, GONE)]


@pytest.mark.parametrize(
    ("pages", "first_position", "reason"),
    [
        ([1, 2, 3], 0, "ends at position 3"),
        ([1], 0, "ends at position 1"),
        ([1, 2], 1, "ends at position 3"),
        ([2, 2], 0, "holds a page twice"),
        ([1, 13], 0, "outside decode's pool"),
    ],
)
def test_a_malformed_reservation_ends_its_room_and_no_rank_sees_it(
    pages: list[int], first_position: int, reason: str
) -> None:
    group = Controller()
    group.submit(1)
    group.take()
    group.controller.on_decode(
        group.peer,
        Reserve(
            **FROM_DECODE,
            room=1,
            first_position=first_position,
            physical_pages=pack_int64(np.array(pages)),
        ),
    )
    sent = group.take()
    assert [(end, type(message)) for end, message in sent] == [
        ("decode", Withdrawn),
        ("server", RoomRefused),
    ]
    refusal = sent[1][1]
    assert isinstance(refusal, RoomRefused)
    assert reason in refusal.reason
    assert not group.controller.step()

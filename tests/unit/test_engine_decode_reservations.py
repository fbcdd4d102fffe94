"""Offers to the decode engine: what is set aside for one, what waits, what is declined."""

from __future__ import annotations

from typing import Any

import pytest

from cp_shared_kv.engine.messages import RoomRefused, Tokens
from cp_shared_kv.testing.recorded_decode import EPOCH, PREFILL_EPOCH, VOCAB, Decode, stop, withdraw
from cp_shared_kv.transfer.codec import unpack_int64
from cp_shared_kv.transfer.messages import AbortRoom, Declined, Reserve, Withdrawn


def test_an_offer_is_answered_with_pages_for_the_prompt_and_its_output_is_set_aside() -> None:
    decode = Decode()
    decode.offer(1, tokens=6, max_tokens=7)
    ((end, reserve),) = decode.take()
    assert end == "controller"
    assert isinstance(reserve, Reserve)
    assert (reserve.room, reserve.first_position) == (1, 0)
    assert (reserve.epoch, reserve.peer_epoch) == (EPOCH, PREFILL_EPOCH)
    assert len(unpack_int64(reserve.physical_pages)) == 2
    assert decode.free_tokens == 40 - 16  # 13 tokens need four pages


def test_offers_wait_for_pages_and_are_reserved_in_their_order() -> None:
    decode = Decode(pages=10)
    decode.run(1, tokens=20, max_tokens=2)  # 6 pages
    decode.offer(2, tokens=20)  # 6 pages: waits
    decode.offer(3, tokens=2)  # would fit, and does not overtake
    decode.offer(2, tokens=20)  # a repeat counts once
    assert decode.take() == []
    assert decode.engine.stats(1).waiting == 2
    decode.engine.step()
    assert [reserve.room for reserve in decode.taken(Reserve)] == [2, 3]
    assert decode.engine.stats(1).waiting == 0


def test_pages_that_come_back_are_reserved_at_once_in_the_order_of_arrival() -> None:
    decode = Decode(pages=10)
    decode.run(1, tokens=20, max_tokens=2)
    for room in (2, 4, 3):
        decode.offer(room, tokens=10, max_tokens=2)  # 3 pages each, of which 4 are left for one
    assert [reserve.room for reserve in decode.taken(Reserve)] == [2]
    decode.engine.step()
    sent = decode.take()
    assert [type(message) for _, message in sent] == [Tokens, Reserve, Reserve]
    assert [message.room for _, message in sent if isinstance(message, Reserve)] == [4, 3]


def test_what_can_never_fit_is_declined_and_holds_up_nobody() -> None:
    decode = Decode(pages=10)
    decode.run(1, tokens=30, max_tokens=2)
    decode.offer(2, tokens=20)
    decode.offer(3, tokens=39, max_tokens=2)  # 41 of 40 tokens
    decode.offer(4, tokens=4, max_tokens=4)
    assert decode.take() == []
    decode.engine.step()
    to_controller = [message for end, message in decode.take() if end == "controller"]
    assert [(type(message), message.room) for message in to_controller] == [  # type: ignore[attr-defined]
        (Reserve, 2),
        (Declined, 3),
        (Reserve, 4),
    ]
    assert decode.engine.stats(1).failed_transfers_total == 1


def test_a_decline_names_the_room_and_the_reason() -> None:
    decode = Decode(pages=10)
    decode.offer(3, tokens=39, max_tokens=2)
    decode.offer(4)
    (to_first, declined), (to_second, reserve) = decode.take()
    assert to_first == to_second == "controller"
    assert isinstance(declined, Declined)
    assert (declined.room, declined.epoch, declined.peer_epoch) == (3, EPOCH, PREFILL_EPOCH)
    assert "11 pages" in declined.reason
    assert "at most 10 pages" in declined.reason
    assert isinstance(reserve, Reserve)
    assert decode.engine.stats(1).waiting == 0


@pytest.mark.parametrize(
    "sampling", [{"stop_token_ids": (VOCAB,)}, {"logit_bias": ((VOCAB, 1.0),)}]
)
def test_an_offer_with_a_token_beyond_the_vocabulary_is_declined(sampling: Any) -> None:
    decode = Decode()
    decode.offer(1, **sampling)
    (declined,) = decode.taken(Declined)
    assert f"token id {VOCAB}" in declined.reason
    assert decode.free_tokens == 40


def test_a_prompt_beyond_the_vocabulary_is_declined_where_penalties_would_index_with_it() -> None:
    decode = Decode(pages=99)
    decode.offer(1, tokens=VOCAB + 1, repetition_penalty=1.1)
    assert len(decode.taken(Declined)) == 1


@pytest.mark.parametrize("message", [stop(2), withdraw(2)])
def test_an_offer_that_waits_is_forgotten(message: AbortRoom | Withdrawn) -> None:
    decode = Decode(pages=10)
    decode.run(1, tokens=30)
    decode.offer(2, tokens=30)
    decode.offer(3, tokens=4, max_tokens=1)
    decode.engine.on_stop(decode.peer, message)
    assert decode.engine.stats(1).waiting == 1
    assert decode.taken(RoomRefused) == []  # prefill tells the client
    decode.engine.on_stop(decode.peer, message)  # unknown by now


def test_a_stopped_head_of_the_queue_lets_the_next_offer_through() -> None:
    decode = Decode(pages=10)
    decode.run(1, tokens=20)
    decode.offer(2, tokens=20)
    decode.offer(3, tokens=4, max_tokens=1)
    assert decode.take() == []
    decode.engine.on_stop(decode.peer, withdraw(2))
    assert [reserve.room for reserve in decode.taken(Reserve)] == [3]

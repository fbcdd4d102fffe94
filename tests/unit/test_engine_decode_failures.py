"""Rooms that are stopped or fail at decode, and when their pages are free again."""

from __future__ import annotations

import pytest

from cp_shared_kv.engine.messages import RoomRefused, Tokens
from cp_shared_kv.testing.recorded_decode import (
    CP_SIZE,
    FROM_PREFILL,
    PAGE_SIZE,
    TO_PREFILL,
    Decode,
    stop,
    tokens,
    withdraw,
)
from cp_shared_kv.transfer.messages import Acknowledged, Declined, Quiesced, Reserve


def test_a_withdrawn_reservation_is_free_at_once() -> None:
    decode = Decode()
    decode.offer(1)
    decode.take()
    decode.engine.on_stop(decode.peer, withdraw(1))
    assert decode.free_tokens == 40
    (refused,) = decode.taken(RoomRefused)
    assert (refused.room, refused.kind) == (1, "failed")
    assert "the client went away" in refused.reason


def test_the_pages_of_a_stopped_room_are_free_when_no_rank_can_write_them() -> None:
    decode = Decode()
    decode.offer(1)
    decode.take()
    decode.engine.on_stop(decode.peer, stop(1))
    assert len(decode.taken(RoomRefused)) == 1
    decode.fail(1, 0)
    assert decode.free_tokens == 28
    decode.fail(1, 1, quiescent=False)
    assert decode.free_tokens == 28
    decode.engine.on_transfer(decode.peer, Quiesced(**FROM_PREFILL, room=1, rank=1))
    assert decode.free_tokens == 40
    assert decode.taken(RoomRefused) == []  # it was said once
    assert decode.engine.stats(1).failed_transfers_total == 0  # nobody wanted it any more


def test_a_failed_rank_fails_the_room_and_prefill_is_told_to_stop_it() -> None:
    decode = Decode()
    decode.offer(1)
    decode.first_token(1)
    decode.send(1, 0)
    decode.take()
    decode.fail(1, 1)
    sent = decode.take()
    assert ("server", RoomRefused(room=1, kind="failed", reason="the wire broke")) in sent
    assert decode.free_tokens == 40
    assert not decode.engine.has_work
    assert decode.engine.stats(1).failed_transfers_total == 1


def test_pages_of_a_failed_room_are_not_given_to_the_next_before_they_are_quiet() -> None:
    decode = Decode(pages=4)
    decode.offer(1, tokens=12, max_tokens=4)
    decode.offer(2, tokens=12, max_tokens=4)
    decode.fail(1, 0, quiescent=False)
    decode.send(1, 1, pages=0)
    assert [reserve.room for reserve in decode.taken(Reserve)] == [1]
    decode.engine.on_transfer(decode.peer, Quiesced(**FROM_PREFILL, room=1, rank=0))
    assert [reserve.room for reserve in decode.taken(Reserve)] == [2]


def test_pages_that_never_came_fail_the_room_by_position() -> None:
    decode = Decode()
    decode.offer(1)
    decode.take()
    decode.send(1, 0, pages=1)
    decode.send(1, 1, pages=1)  # nobody sends position 1
    (refused,) = decode.taken(RoomRefused)
    assert "positions 1" in refused.reason
    assert decode.free_tokens == 40


def test_a_running_request_that_is_stopped_ends_at_once() -> None:
    decode = Decode()
    decode.run(1)
    decode.engine.step()
    decode.take()
    decode.engine.on_stop(decode.peer, stop(1))
    assert decode.take() == [("server", tokens(1, end="abort"))]
    assert not decode.engine.has_work
    assert decode.free_tokens == 40


def test_a_covered_request_without_its_first_token_is_stopped() -> None:
    decode = Decode()
    decode.offer(1)
    decode.send_all(1)
    decode.take()
    decode.engine.on_stop(decode.peer, stop(1))
    assert decode.free_tokens == 40
    decode.first_token(1)
    assert not decode.engine.has_work
    assert decode.taken(Tokens) == []


def test_a_first_token_for_a_failed_room_starts_nothing() -> None:
    decode = Decode()
    decode.offer(1)
    decode.fail(1, 0, quiescent=False)
    decode.first_token(1)
    decode.send(1, 1)
    assert not decode.engine.has_work
    assert decode.taken(Tokens) == []


@pytest.mark.parametrize("stage", ["waiting", "receiving", "covered", "running"])
def test_a_client_that_goes_away_at_any_stage_frees_the_pages(stage: str) -> None:
    decode = Decode(pages=5)
    decode.offer(9, tokens=12, max_tokens=8)  # holds all pages
    room = 9
    if stage == "waiting":
        decode.offer(1)
        room = 1
    elif stage != "receiving":
        decode.send_all(9, pages=3)
    if stage == "running":
        decode.first_token(9)
    decode.take()
    decode.engine.cancel(room, "the client went away")
    told = decode.take()
    if stage == "waiting":
        ((end, declined),) = told
        assert end == "controller"
        assert isinstance(declined, Declined)
        decode.engine.cancel(9, "the client went away")
        decode.take()
    else:
        ends = [m for end, m in told if end == "server" and isinstance(m, Tokens | RoomRefused)]
        assert len(ends) == 1
    if stage in ("waiting", "receiving"):  # the ranks have to say that they are through
        for rank in range(CP_SIZE):
            decode.fail(9, rank)
    assert decode.free_tokens == 5 * PAGE_SIZE
    decode.engine.cancel(room, "again")
    decode.engine.cancel(77, "never heard of")


@pytest.mark.parametrize("of", ["concluded", "quiesced"])
def test_the_last_word_on_a_forgotten_room_is_acknowledged(of: str) -> None:
    decode = Decode()
    decode.run(1, max_tokens=1)
    late = decode.success(1, 0)
    if of == "quiesced":
        late = Quiesced(**FROM_PREFILL, room=1, rank=0)
    decode.engine.on_transfer(decode.peer, late)
    assert decode.take() == [("rank 0", Acknowledged(**TO_PREFILL, room=1, rank=0, of=of))]  # type: ignore[arg-type]


def test_pages_sent_again_for_a_forgotten_room_need_no_answer() -> None:
    decode = Decode()
    decode.run(1, max_tokens=1)
    decode.send(1, 0)
    assert [type(message) for _, message in decode.take()] == [Acknowledged]

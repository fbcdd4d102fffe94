"""The decode engine's check of its own books, and of the pages that it was sent."""

from __future__ import annotations

from typing import Any

import numpy as np

from cp_shared_kv.engine.messages import RoomRefused
from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.testing.recorded_decode import PAGE_SIZE, Decode
from cp_shared_kv.transfer.codec import unpack_int64
from cp_shared_kv.transfer.messages import Reserve


def test_pages_that_stay_in_quarantine_for_too_long_are_named_with_whom_they_wait_for() -> None:
    decode = Decode()
    decode.offer(1)
    decode.fail(1, 0)
    assert decode.engine.problems(now_seconds=100.0) == []
    assert decode.engine.problems(now_seconds=129.0) == []
    (problem,) = decode.engine.problems(now_seconds=131.0)
    assert "room 1 has 2 pages in quarantine for 31 s" in problem
    assert "[1]" in problem
    decode.fail(1, 1)
    assert decode.engine.problems(now_seconds=132.0) == []


def test_a_page_that_no_request_holds_is_a_problem() -> None:
    decode = Decode()
    assert decode.engine.problems(0.0) == []
    decode.engine._pool.admit(77, np.zeros(0, "V16"), 2)
    (problem,) = decode.engine.problems(0.0)
    assert "not those of the pool" in problem


def sums_of_seven(pages: PhysicalPages) -> np.ndarray[Any, Any]:
    return np.full(len(pages), 7)


def test_pages_with_the_right_checksums_start_as_ever() -> None:
    decode = Decode(checksums=sums_of_seven)
    decode.offer(1)
    decode.first_token(1)
    decode.send_all(1, checksum=7)
    assert [one.token_ids for one in decode.steps()] == [[10], [11], [12], [13]]


def test_a_damaged_page_is_named_and_fails_its_request_alone() -> None:
    decode = Decode(checksums=sums_of_seven)
    for room in (1, 2):
        decode.offer(room)
        decode.first_token(room)
    (first, _) = decode.taken(Reserve)
    decode.send(1, 0, checksum=7)
    decode.send(1, 1, checksum=8)
    ends = [message for end, message in decode.take() if end == "server"]
    ((refusal),) = ends
    assert isinstance(refusal, RoomRefused)
    assert (refusal.room, refusal.kind) == (1, "failed")
    page = unpack_int64(first.physical_pages)[1]
    assert f"from CP rank 1: position 1 of the request, physical page {page} at decode" in (
        refusal.reason
    )
    assert "0x00000007, sent with 0x00000008" in refusal.reason
    assert decode.engine.stats(1).failed_transfers_total == 1
    decode.send_all(2, checksum=7)
    assert [one.room for one in decode.steps()] == [2, 2, 2, 2]
    assert decode.free_tokens == 10 * PAGE_SIZE


def test_pages_without_the_checksums_that_were_agreed_on_fail_their_request() -> None:
    decode = Decode(checksums=sums_of_seven)
    decode.offer(1)
    decode.send_all(1)
    (refusal,) = decode.taken(RoomRefused)
    assert "CP rank 0 sent pages without checksums" in refusal.reason

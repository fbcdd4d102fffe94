"""Prefill to decode through SGLang's managers over Mooncake's TCP: every page, byte for byte."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import transfer_world

Send = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 4])
def group(request: pytest.FixtureRequest) -> Iterator[tuple[int, Send]]:
    pytest.importorskip("mooncake", reason="the Mooncake Transfer Engine is not installed here")
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=transfer_world.serve, args=(request.param, theirs), daemon=True)
    process.start()
    theirs.close()

    def answer(seconds: float) -> Any:
        if not ours.poll(seconds):
            raise TimeoutError("the transfer world does not answer")
        result = ours.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def send(**case: Any) -> dict[str, Any]:
        ours.send(case)
        return answer(100)

    try:
        assert answer(250) == "ready"
        yield request.param, send
    finally:
        process.kill()
        process.join()


def _succeeded(result: dict[str, Any], cp_size: int, destinations: list[int]) -> bool:
    assert (result["receiver"], result["senders"]) == ("Success", ["Success"] * cp_size)
    assert result["touched"] == sorted(destinations)
    assert result["aux"] == 7
    return result["right"]


CASES = {
    "one chunk": ([3, 4, 5, 9, 10], [20, 21, 30, 31, 11], [5]),
    "chunked": ([1, 2, 3, 4, 5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [3, 2, 2]),
    "fragmented": ([10, 23, 2, 17, 5, 24], [12, 2, 33, 7, 9, 28], [4, 2]),
    "all of one owner": ([1, 5, 9, 13], [4, 3, 2, 1], [4]),
    "last chunk of one owner": ([1, 2, 3, 4, 5], [5, 6, 7, 8, 9], [4, 1]),
    "fewer pages than ranks": ([6], [13], [1]),
}


@pytest.mark.parametrize("name", CASES)
def test_decode_has_every_page(group: tuple[int, Send], name: str) -> None:
    cp_size, send = group
    logical, destinations, chunks = CASES[name]

    result = send(logical_pages=logical, destinations=destinations, chunks=chunks)

    assert _succeeded(result, cp_size, destinations)


def test_pages_that_decode_has_already_are_not_sent(group: tuple[int, Send]) -> None:
    cp_size, send = group

    result = send(
        logical_pages=[4, 9, 2, 7, 8, 1], destinations=[5, 3, 8, 2], chunks=[3, 1], prefix=2
    )

    assert _succeeded(result, cp_size, [5, 3, 8, 2])


def test_index_k_that_is_not_sent_fails_the_room(group: tuple[int, Send]) -> None:
    cp_size, send = group

    result = send(
        logical_pages=[1, 2, 3, 4],
        destinations=[1, 2, 3, 4],
        chunks=[4],
        trouble="index K of rank 1",
    )

    assert result["receiver"] == "Failed"
    assert result["senders"] == ["Success", "Failed", *["Success"] * (cp_size - 2)]


def test_positions_past_the_reservation_fail_the_room_and_nothing_else(
    group: tuple[int, Send],
) -> None:
    cp_size, send = group
    logical, destinations = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8]

    result = send(logical_pages=logical, destinations=destinations, chunks=[8], reserved=3)

    assert result["receiver"] == "Failed"
    assert "Failed" in result["senders"]
    assert set(result["touched"]) <= {1, 2, 3}
    again = send(logical_pages=logical, destinations=destinations, chunks=[8])
    assert _succeeded(again, cp_size, destinations)


def test_an_aborted_room_does_not_end_in_success(group: tuple[int, Send]) -> None:
    cp_size, send = group

    # SGLang tells decode nothing of this; it waits for its own time limit.
    pages = {"logical_pages": [1, 2, 3, 4], "destinations": [1, 2, 3, 4], "chunks": [2, 2]}
    result = send(**pages, trouble="aborted", seconds=4.0)

    assert result["receiver"] != "Success"
    assert result["senders"][0] == "Failed"
    assert _succeeded(send(**pages), cp_size, [1, 2, 3, 4])

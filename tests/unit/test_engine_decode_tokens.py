"""From exact cover to the last token."""

from __future__ import annotations

from pathlib import Path

import pytest

from cp_shared_kv.engine.codecs import RECORDED
from cp_shared_kv.engine.messages import Tokens
from cp_shared_kv.engine.recording import read_messages
from cp_shared_kv.testing.recorded_decode import EOS, EPOCH, PREFILL_EPOCH, Decode, tokens
from cp_shared_kv.transfer.codec import unpack_int64
from cp_shared_kv.transfer.messages import Acknowledged, Released, Reserve


@pytest.mark.parametrize("token_first", [True, False])
def test_decoding_starts_when_both_the_cover_and_the_first_token_are_there(
    token_first: bool,
) -> None:
    decode = Decode()
    decode.offer(1)
    decode.take()
    if token_first:
        decode.first_token(1)
    decode.send(1, 0)
    assert not decode.engine.has_work
    decode.send(1, 1)
    if not token_first:
        assert not decode.engine.has_work
        assert decode.taken(Tokens) == []
        decode.first_token(1)
    assert decode.engine.has_work
    assert decode.taken(Tokens) == [tokens(1, 10)]


def test_each_rank_is_acknowledged_and_prefill_hears_of_the_cover() -> None:
    decode = Decode()
    decode.offer(1)
    decode.take()
    decode.send(1, 1)
    decode.send(1, 0)
    answer = {"epoch": EPOCH, "peer_epoch": PREFILL_EPOCH, "room": 1}
    assert decode.take() == [
        ("rank 1", Acknowledged(**answer, rank=1, of="concluded")),
        ("rank 0", Acknowledged(**answer, rank=0, of="concluded")),
        ("controller", Released(**answer)),
    ]


def test_the_tokens_of_a_request_are_written_one_after_another_behind_its_prompt() -> None:
    decode = Decode()
    decode.run(1, tokens=6, max_tokens=4, first=10)
    assert decode.steps() == [tokens(1, 11), tokens(1, 12), tokens(1, 13, end="length")]
    parts = [batch.requests[0] for batch in decode.runner.batches]
    assert [part.prefix_tokens for part in parts] == [6, 7, 8]
    assert [len(part.pages()) for part in parts] == [2, 2, 3]
    assert all(part.last and part.new_tokens == 1 for part in parts)
    assert [batch.batch_id for batch in decode.runner.batches] == [1, 2, 3]
    assert decode.free_tokens == 40


def test_the_reserved_pages_are_those_that_decoding_reads() -> None:
    decode = Decode()
    decode.offer(1)
    (reserve,) = decode.taken(Reserve)
    decode.first_token(1)
    decode.send_all(1)
    decode.engine.step()
    read = decode.runner.batches[0].requests[0].pages()
    assert read.tolist() == unpack_int64(reserve.physical_pages).tolist()


def test_all_running_requests_share_a_step() -> None:
    decode = Decode()
    decode.run(1, max_tokens=2, first=20)
    decode.run(2, max_tokens=3, first=40)
    assert decode.steps() == [
        tokens(1, 21, end="length"),
        tokens(2, 41),
        tokens(2, 42, end="length"),
    ]
    assert [batch.tokens().tolist() for batch in decode.runner.batches] == [[20, 40], [41]]


def test_no_more_than_the_limit_run_at_once_and_the_first_come_first() -> None:
    decode = Decode(pages=20, max_running=2)
    for room in (1, 2, 3):
        decode.run(room, max_tokens=3)
    decode.steps()
    assert [[part.room for part in batch.requests] for batch in decode.runner.batches] == [
        [1, 2],
        [1, 2],
        [3],
        [3],
    ]


def test_one_token_is_prefills_and_needs_no_step() -> None:
    decode = Decode()
    decode.offer(1, max_tokens=1)
    decode.first_token(1)
    decode.send_all(1)
    assert not decode.engine.has_work
    assert decode.taken(Tokens) == [tokens(1, 10, end="length")]
    assert decode.free_tokens == 40


@pytest.mark.parametrize("first", [EOS, EOS - 1, EOS - 2])
def test_an_end_of_sequence_token_stops_and_is_part_of_the_output(first: int) -> None:
    decode = Decode()
    decode.offer(1, max_tokens=10)
    decode.first_token(1, first)
    decode.send_all(1)
    expected = [tokens(1, token) for token in range(first, EOS)]
    assert decode.steps() == [*expected, tokens(1, EOS, end="stop")]
    assert decode.free_tokens == 40


def test_an_ignored_end_of_sequence_token_is_a_token_like_others() -> None:
    decode = Decode()
    decode.engine._eos = frozenset([11])
    decode.offer(1, max_tokens=3, ignore_eos=True)
    decode.first_token(1, 10)
    decode.send_all(1)
    assert decode.steps() == [tokens(1, 10), tokens(1, 11), tokens(1, 12, end="length")]


def test_the_last_allowed_token_ends_by_its_own_meaning() -> None:
    decode = Decode()
    decode.run(1, max_tokens=2, first=EOS - 1)
    assert decode.steps() == [tokens(1, EOS, end="stop")]


def test_the_figures_add_up() -> None:
    decode = Decode(pages=10)
    decode.run(1, tokens=6, max_tokens=4)
    decode.offer(2, tokens=20)
    decode.offer(3, tokens=20)
    decode.engine.step()
    stats = decode.engine.stats(8)
    assert (stats.ticket, stats.waiting, stats.running) == (8, 1, 1)
    assert (stats.used_tokens, decode.free_tokens) == (12 + 24, 4)
    assert stats.generated_tokens_total == 2


def test_a_recording_tells_reservations_starts_and_steps_in_their_order(tmp_path: Path) -> None:
    decode = Decode(log=tmp_path / "decode.messages")
    decode.run(1, max_tokens=2)
    decode.run(2, max_tokens=1)
    decode.steps()
    recorded = [RECORDED.decode(data) for data in read_messages(tmp_path / "decode.messages")]
    kinds = [type(message).__name__ for message in recorded]
    assert kinds == ["Reserve", "FirstToken", "Reserve", "FirstToken", "Batch"]
    assert recorded[-1] == decode.runner.batches[0]

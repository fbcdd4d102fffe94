"""How the decode engine chooses tokens as a request asks."""

from __future__ import annotations

from typing import Any

import pytest

from cp_shared_kv.engine.messages import NO_NUMBERS, RoomRefused, Tokens
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.testing.recorded_decode import (
    FROM_PREFILL,
    PAGE_SIZE,
    POISON,
    VOCAB,
    Decode,
    tokens,
)
from cp_shared_kv.transfer.messages import FirstToken
from cp_shared_kv.transfer.sampling_params import SampledLogprobs


def test_a_stop_id_ends_like_an_end_of_sequence_token() -> None:
    decode = Decode()
    decode.run(1, max_tokens=9, stop_token_ids=(12,))
    assert decode.steps() == [tokens(1, 11), tokens(1, 12, end="stop")]
    assert decode.free_tokens == 40


def test_no_ending_is_chosen_before_the_least_tokens() -> None:
    decode = Decode()
    decode.run(1, max_tokens=4, first=97, min_tokens=3)  # 98, then 99 would be the end
    chosen = [token for step in decode.steps() for token in step.token_ids]
    assert chosen == [98, 0, 1]  # all other logits are equal: the lowest id


def test_the_first_token_counts_for_the_penalties_and_the_prompt_for_one_of_them() -> None:
    decode = Decode()
    decode.run(1, max_tokens=3, logit_bias=((50, 21.0),), presence_penalty=2.0, first=50)
    decode.run(2, max_tokens=3, logit_bias=((5, 21.0),), repetition_penalty=1.1, first=60)
    decode.run(3, max_tokens=3, logit_bias=((5, 21.0),), frequency_penalty=2.0, first=70)
    decode.engine.step()
    # Room 1 has put 50 out already, 5 is in room 2's prompt and does not count in room 3.
    assert [told.token_ids for told in decode.taken(Tokens)] == [[51], [61], [5]]


def test_tokens_of_a_seed_do_not_depend_on_the_company() -> None:
    def run(*rooms: int) -> dict[int, list[int]]:
        decode = Decode(pages=99)
        for room in rooms:
            flat = {"temperature": 100.0, "seed": room % 10, "ignore_eos": True}
            decode.run(room, max_tokens=8, first=20, **flat)
        found: dict[int, list[int]] = {room: [] for room in rooms}
        for told in decode.steps():
            found[told.room] += told.token_ids
        return found

    together = run(1, 2, 11, 3)
    assert together[1] == together[11]  # the same seed
    assert len({tuple(found) for found in together.values()}) == 3
    assert all(run(room)[room] == found for room, found in together.items())


def test_logprobs_are_told_with_every_token_and_the_first_ones_are_prefills() -> None:
    decode = Decode()
    decode.offer(1, max_tokens=3, logprobs=1)
    first = SampledLogprobs(logprob=-0.25, top=((10, -0.25),))
    decode.engine.on_first_token(
        decode.peer, FirstToken(**FROM_PREFILL, room=1, token_id=10, logprobs=first)
    )
    decode.send_all(1)
    told = decode.steps()
    assert told[0].logprobs == [first]
    assert [t.token_ids for t in told] == [[10], [11], [12]]
    for one in told[1:]:
        assert one.logprobs is not None
        assert [token for token, _ in one.logprobs[0].top] == one.token_ids


def test_a_first_token_beyond_the_vocabulary_is_refused() -> None:
    decode = Decode()
    decode.offer(1)
    with pytest.raises(ProtocolError, match="vocabulary"):
        decode.first_token(1, VOCAB)


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 2}, {"temperature": 1.0, "logprobs": 0}])
def test_a_request_whose_logits_are_no_numbers_fails_alone(
    sampling: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    decode = Decode()
    decode.run(1, max_tokens=6, first=POISON - 2, top_k=1, seed=1, **sampling)
    decode.run(2, max_tokens=6, first=10)
    for _ in range(4):
        decode.engine.step()
    told = [message for end, message in decode.take() if end == "server"]
    assert [m for m in told if isinstance(m, RoomRefused)] == [
        RoomRefused(room=1, kind="failed", reason=NO_NUMBERS)
    ]
    assert f"room 1: {NO_NUMBERS}" in caplog.text
    output = [m for m in told if isinstance(m, Tokens)] + decode.steps()
    assert [m.token_ids for m in output if m.room == 1] == [[POISON - 1], [POISON]]
    assert [m.token_ids for m in output if m.room == 2] == [[token] for token in range(11, 16)]
    assert decode.engine.stats(1).failed_transfers_total == 0  # its pages had all come
    assert decode.free_tokens == 10 * PAGE_SIZE

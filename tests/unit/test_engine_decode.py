"""The decode engine with two ranks played by hand and a runner without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import pytest
import torch

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.codecs import DECODE_TO_CONTROLLER, RECORDED, TO_SERVER, encode
from cp_shared_kv.engine.decode import DecodeEngine
from cp_shared_kv.engine.decode_room import PrefillPeer
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import NO_NUMBERS, RoomRefused, Tokens
from cp_shared_kv.engine.recording import MessageLog, read_messages
from cp_shared_kv.engine.sampling.sampler import SampledToken, sample_where_numbers
from cp_shared_kv.engine.sampling.state import SamplingState
from cp_shared_kv.engine.verification import Checksums
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.layout.capacity import KVCapacity
from cp_shared_kv.layout.pages import PhysicalPages
from cp_shared_kv.memory.logical_pool import LogicalPool
from cp_shared_kv.transfer.codec import pack_int64, unpack_int64
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Acknowledged,
    Concluded,
    Declined,
    FirstToken,
    Offer,
    Quiesced,
    Released,
    Reserve,
    Sent,
    Withdrawn,
)
from cp_shared_kv.transfer.sampling_params import SampledLogprobs, SamplingParams

EPOCH, PREFILL_EPOCH = 200, 100
PAGE_SIZE, CP_SIZE, VOCAB, EOS, POISON = 4, 2, 100, 99, 66
FROM_PREFILL: dict[str, Any] = {"epoch": PREFILL_EPOCH, "peer_epoch": EPOCH}
TO_PREFILL: dict[str, Any] = {"epoch": EPOCH, "peer_epoch": PREFILL_EPOCH}
End = Literal["server", "controller", "rank 0", "rank 1"]
M = TypeVar("M", bound=msgspec.Struct)


class NextNumbers:
    """A runner by whose logits the last token plus one is likeliest, and any other as good as 0.

    After `POISON` they are NaN.
    """

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def execute(
        self, batch: Batch, sampling: dict[int, SamplingState]
    ) -> dict[int, SampledToken | None]:
        batch.validate(page_size=PAGE_SIZE, logical_pages=1000, vocab_size=VOCAB)
        self.batches.append(batch)
        rooms = [part.room for part in batch.requests]
        logits = torch.zeros(len(rooms), VOCAB)
        logits[range(len(rooms)), (batch.tokens() + 1).tolist()] = 20.0
        logits[batch.tokens() == POISON, 3] = torch.nan
        chosen = sample_where_numbers(logits, [sampling[room] for room in rooms])
        return dict(zip(rooms, chosen, strict=True))


class Decode:
    """A decode engine; what it sends is kept in order, with its receiver."""

    def __init__(
        self,
        pages: int = 10,
        max_running: int = 8,
        log: Path | None = None,
        checksums: Checksums | None = None,
    ) -> None:
        self.sent: list[tuple[End, msgspec.Struct]] = []
        self.runner = NextNumbers()
        self.engine = DecodeEngine(
            LogicalPool(KVCapacity(pages, PAGE_SIZE, 1), prefix_caching=False),
            self.runner,  # type: ignore[arg-type]
            epoch=EPOCH,
            cp_size=CP_SIZE,
            max_running=max_running,
            quarantine_seconds=30.0,
            vocab_size=VOCAB,
            eos_token_ids=frozenset([EOS]),
            to_server=lambda message: self.sent.append(("server", message)),
            log=None if log is None else MessageLog(log),
            checksums=checksums,
        )
        self.peer = PrefillPeer(
            Life("prefill", 0, 1),
            PREFILL_EPOCH,
            to_controller=lambda message: self.sent.append(("controller", message)),
            to_rank=lambda rank, message: self.sent.append((f"rank {rank}", message)),  # type: ignore[arg-type]
        )

    def take(self) -> list[tuple[End, msgspec.Struct]]:
        """What was sent since the last call."""
        taken, self.sent = self.sent, []
        self.engine.check_invariants()
        return taken

    def taken(self, kind: type[M]) -> list[M]:
        return [message for _, message in self.take() if isinstance(message, kind)]

    def offer(self, room: int, tokens: int = 6, max_tokens: int = 4, **sampling: Any) -> None:
        self.engine.on_offer(
            self.peer,
            Offer(
                **FROM_PREFILL,
                room=room,
                token_ids=pack_int64(np.arange(tokens)),
                max_tokens=max_tokens,
                sampling=SamplingParams(**sampling),
            ),
        )

    def first_token(self, room: int, token: int = 10) -> None:
        self.engine.on_first_token(self.peer, FirstToken(**FROM_PREFILL, room=room, token_id=token))

    def send(self, room: int, rank: int, pages: int = 2, checksum: int | None = None) -> None:
        """The rank sends its pages (those with position % 2 == rank) and concludes."""
        positions = np.arange(rank, pages, CP_SIZE)
        self.engine.on_transfer(
            self.peer,
            Sent(
                **FROM_PREFILL,
                room=room,
                rank=rank,
                chunk=0,
                positions=pack_int64(positions),
                descriptors=1,
                nbytes=8,
                checksums=b""
                if checksum is None
                else pack_int64(np.full(len(positions), checksum)),
            ),
        )
        self.engine.on_transfer(self.peer, self.success(room, rank, len(positions)))

    def success(self, room: int, rank: int, positions: int = 1) -> Concluded:
        return Concluded(
            **FROM_PREFILL,
            room=room,
            rank=rank,
            outcome="success",
            quiescent=True,
            sent_chunks=1,
            total_positions=positions,
        )

    def fail(self, room: int, rank: int, quiescent: bool = True) -> None:
        self.engine.on_transfer(
            self.peer,
            Concluded(
                **FROM_PREFILL,
                room=room,
                rank=rank,
                outcome="failed",
                reason="the wire broke",
                quiescent=quiescent,
                sent_chunks=0,
                total_positions=0,
            ),
        )

    def run(
        self, room: int, tokens: int = 6, max_tokens: int = 4, first: int = 10, **sampling: Any
    ) -> None:
        """Bring a room to where it decodes."""
        self.offer(room, tokens, max_tokens, **sampling)
        self.first_token(room, first)
        for rank in range(CP_SIZE):
            self.send(room, rank, -(-tokens // PAGE_SIZE))
        self.take()

    def steps(self, limit: int = 20) -> list[Tokens]:
        """Decode until nothing runs."""
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.engine.step()
        return self.taken(Tokens)

    @property
    def free_tokens(self) -> int:
        return self.engine.stats(1).available_tokens


def tokens(room: int, *ids: int, end: Literal["stop", "length", "abort"] | None = None) -> Tokens:
    return Tokens(room=room, token_ids=list(ids), finish_reason=end)


def stop(room: int) -> AbortRoom:
    return AbortRoom(**FROM_PREFILL, room=room, reason="the client went away")


def withdraw(room: int) -> Withdrawn:
    return Withdrawn(**FROM_PREFILL, room=room, reason="the client went away")


# Reservations ------------------------------------------------------------------------------------


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


# From cover to the last token --------------------------------------------------------------------


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
    decode.send(1, 0)
    decode.send(1, 1)
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
    decode.send(1, 0)
    decode.send(1, 1)
    assert not decode.engine.has_work
    assert decode.taken(Tokens) == [tokens(1, 10, end="length")]
    assert decode.free_tokens == 40
    assert decode.engine.stats(1).finished_total == 1


@pytest.mark.parametrize("first", [EOS, EOS - 1, EOS - 2])
def test_an_end_of_sequence_token_stops_and_is_part_of_the_output(first: int) -> None:
    decode = Decode()
    decode.offer(1, max_tokens=10)
    decode.first_token(1, first)
    decode.send(1, 0)
    decode.send(1, 1)
    expected = [tokens(1, token) for token in range(first, EOS)]
    assert decode.steps() == [*expected, tokens(1, EOS, end="stop")]
    assert decode.free_tokens == 40


def test_an_ignored_end_of_sequence_token_is_a_token_like_others() -> None:
    decode = Decode()
    decode.engine._eos = frozenset([11])
    decode.offer(1, max_tokens=3, ignore_eos=True)
    decode.first_token(1, 10)
    decode.send(1, 0)
    decode.send(1, 1)
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
    assert (stats.used_tokens, stats.available_tokens) == (12 + 24, 4)
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


# Sampling ----------------------------------------------------------------------------------------


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
    decode.send(1, 0)
    decode.send(1, 1)
    told = decode.steps()
    assert told[0].logprobs == [first]
    assert [t.token_ids for t in told] == [[10], [11], [12]]
    for one in told[1:]:
        assert one.logprobs is not None
        assert [token for token, _ in one.logprobs[0].top] == one.token_ids


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


def test_a_first_token_beyond_the_vocabulary_is_refused() -> None:
    decode = Decode()
    decode.offer(1)
    with pytest.raises(ProtocolError, match="vocabulary"):
        decode.first_token(1, VOCAB)


# Stops and failures ------------------------------------------------------------------------------


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
    assert decode.engine.stats(1).failed_rooms_total == 1


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
    decode.send(1, 0)
    decode.send(1, 1)
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


@pytest.mark.parametrize(
    "life",
    [{"epoch": PREFILL_EPOCH - 1, "peer_epoch": EPOCH}, {"epoch": PREFILL_EPOCH, "peer_epoch": 1}],
    ids=["sender", "receiver"],
)
@pytest.mark.parametrize("state", ["unknown", "waiting", "receiving", "covered", "running"])
def test_messages_of_another_life_are_refused_in_every_state(
    life: dict[str, int], state: str
) -> None:
    decode = Decode(pages=10)
    if state == "waiting":
        decode.offer(7, tokens=37, max_tokens=1)
    if state != "unknown":
        decode.offer(1)
    if state in ("covered", "running"):
        decode.send(1, 0)
        decode.send(1, 1)
    if state == "running":
        decode.first_token(1)
    decode.take()
    before = decode.engine.stats(1)
    offer = Offer(**life, room=1, token_ids=pack_int64(np.arange(6)), max_tokens=4)
    with pytest.raises(ProtocolError, match="another life"):
        decode.engine.on_offer(decode.peer, offer)
    with pytest.raises(ProtocolError, match="another life"):
        decode.engine.on_first_token(decode.peer, FirstToken(**life, room=1, token_id=5))
    for message in (AbortRoom(**life, room=1, reason="x"), Withdrawn(**life, room=1, reason="x")):
        with pytest.raises(ProtocolError, match="another life"):
            decode.engine.on_stop(decode.peer, message)
    if state != "waiting":  # no rank knows of a room that is not reserved
        with pytest.raises(ProtocolError, match="another life"):
            decode.engine.on_transfer(decode.peer, Quiesced(**life, room=1, rank=0))
    assert decode.take() == []
    assert decode.engine.stats(1) == before


# Prefill groups and the server come and go -------------------------------------------------------


def test_what_a_lost_group_has_sent_in_full_goes_on_and_the_rest_fails_with_the_reason() -> None:
    decode = Decode(pages=14)
    decode.run(1, max_tokens=3)  # runs
    decode.offer(2)  # some pages are missing
    decode.send(2, 0)
    decode.offer(3)  # only the first token is missing
    for rank in range(CP_SIZE):
        decode.send(3, rank)
    decode.offer(4, tokens=20)  # waits for pages
    decode.take()
    decode.engine.peer_dead(decode.peer, "prefill-0 was killed")
    refused = [
        RoomRefused(room=n, kind="unavailable", reason="prefill-0 was killed") for n in (2, 3)
    ]
    assert decode.take() == [("server", message) for message in refused]
    assert [one.token_ids for one in decode.steps()] == [[11], [12]]
    assert decode.free_tokens == 14 * PAGE_SIZE
    assert decode.engine.open_rooms == 0


def test_pages_in_quarantine_are_free_once_their_group_is_reaped() -> None:
    decode = Decode()
    decode.offer(1)
    decode.fail(1, 0, quiescent=False)
    decode.take()
    assert decode.free_tokens < 10 * PAGE_SIZE
    decode.engine.peer_dead(decode.peer, "prefill-0 was killed")
    assert decode.take() == []  # it had failed before, and nobody is left to be told
    assert decode.free_tokens == 10 * PAGE_SIZE


def test_one_group_has_no_say_in_anothers_rooms() -> None:
    decode = Decode()
    decode.offer(1)
    decode.take()
    stranger = PrefillPeer(
        Life("prefill", 1, 1), PREFILL_EPOCH, lambda message: None, lambda rank, message: None
    )
    (offer,) = (room.offer for room in decode.engine._rooms.values())
    for act in (
        lambda: decode.engine.on_stop(stranger, withdraw(1)),
        lambda: decode.engine.on_offer(stranger, offer),
        lambda: decode.engine.on_transfer(stranger, decode.success(1, 0)),
        lambda: decode.engine.on_first_token(
            stranger, FirstToken(**FROM_PREFILL, room=1, token_id=10)
        ),
    ):
        with pytest.raises(ProtocolError, match=r"another prefill group|prefill-1\.1 speaks"):
            act()
    assert decode.take() == []
    decode.engine.peer_dead(stranger, "it was killed")
    assert decode.take() == []
    for rank in range(CP_SIZE):
        decode.send(1, rank)
    decode.first_token(1)
    assert [one.token_ids for one in decode.steps()] == [[10], [11], [12], [13]]


@pytest.mark.parametrize("stage", ["waiting", "receiving", "covered", "running"])
def test_a_client_that_goes_away_at_any_stage_frees_the_pages(stage: str) -> None:
    decode = Decode(pages=5)
    decode.offer(9, tokens=12, max_tokens=8)  # holds all pages
    room = 9
    if stage == "waiting":
        decode.offer(1)
        room = 1
    elif stage != "receiving":
        for rank in range(CP_SIZE):
            decode.send(9, rank, pages=3)
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


def test_without_a_server_nothing_is_left_but_what_ranks_may_still_write() -> None:
    decode = Decode(pages=14)
    decode.run(1)
    decode.offer(2)
    decode.engine.server_lost("the server was killed")
    assert not decode.engine.has_work
    for rank in range(CP_SIZE):
        decode.fail(2, rank)
    assert decode.engine.open_rooms == 0
    assert decode.free_tokens == 14 * PAGE_SIZE


# Self-check --------------------------------------------------------------------------------------


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


# Verification ------------------------------------------------------------------------------------


def sums_of_seven(pages: PhysicalPages) -> np.ndarray[Any, Any]:
    return np.full(len(pages), 7)


def test_pages_with_the_right_checksums_start_as_ever() -> None:
    decode = Decode(checksums=sums_of_seven)
    decode.offer(1)
    decode.first_token(1)
    for rank in range(CP_SIZE):
        decode.send(1, rank, checksum=7)
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
    for rank in range(CP_SIZE):
        decode.send(2, rank, checksum=7)
    assert [one.room for one in decode.steps()] == [2, 2, 2, 2]
    assert decode.free_tokens == 10 * PAGE_SIZE


def test_pages_without_the_checksums_that_were_agreed_on_fail_their_request() -> None:
    decode = Decode(checksums=sums_of_seven)
    decode.offer(1)
    for rank in range(CP_SIZE):
        decode.send(1, rank)
    (refusal,) = decode.taken(RoomRefused)
    assert "CP rank 0 sent pages without checksums" in refusal.reason


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
    assert decode.engine.failed_total == 1
    assert decode.free_tokens == 10 * PAGE_SIZE


@pytest.mark.parametrize("reason", ["", "x" * 50_000])
def test_whatever_a_process_died_of_its_rooms_can_be_told(reason: str) -> None:
    decode = Decode(pages=10)
    decode.offer(1, tokens=6)
    decode.offer(2, tokens=6)
    decode.offer(3, tokens=39, max_tokens=1)  # waits
    decode.take()
    decode.engine.cancel(1, reason)
    decode.engine.cancel(3, reason)
    told = decode.take()
    decode.engine.peer_dead(decode.peer, reason)
    told += decode.take()
    assert {type(message) for _, message in told} == {AbortRoom, RoomRefused, Declined}
    for end, message in told:
        codec = TO_SERVER if end == "server" else DECODE_TO_CONTROLLER
        assert codec.decode(encode(message)) == message

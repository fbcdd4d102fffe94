"""The prefill controller: whom it tells what, with its sends recorded and no process started."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import pytest

from cp_shared_kv.engine.api import RefusalKind
from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.codecs import RECORDED, TO_RANK, TO_SERVER, encode
from cp_shared_kv.engine.codecs import TO_DECODE as TO_DECODE_CODEC
from cp_shared_kv.engine.config import EngineConfig
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.lives import Life
from cp_shared_kv.engine.messages import (
    NO_NUMBERS,
    Admitted,
    BatchDone,
    Cancel,
    Check,
    Checked,
    DisconnectDecode,
    Flush,
    Flushed,
    PageMapRequest,
    Paired,
    PrefillStats,
    RankState,
    Registered,
    RoomConcluded,
    RoomRefused,
    RoomToken,
    StatsRequest,
    Submit,
    ToldPageMap,
)
from cp_shared_kv.engine.pairing import DecodePeer
from cp_shared_kv.engine.prefill import PrefillController
from cp_shared_kv.engine.recording import read_messages
from cp_shared_kv.engine.run_spec import PageLayout, RunSpec
from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Declined,
    FirstToken,
    Offer,
    OpenRoom,
    Released,
    Reserve,
    Withdrawn,
)
from cp_shared_kv.transfer.sampling_params import SampledLogprobs, SamplingParams

EPOCH, DECODE_EPOCH = 100, 200
DECODE = Life("decode", 0, 1)
PAGE_SIZE, CP_SIZE, VOCAB = 4, 2, 50
FROM_DECODE: dict[str, Any] = {"epoch": DECODE_EPOCH, "peer_epoch": EPOCH}
TO_DECODE: dict[str, Any] = {"epoch": EPOCH, "peer_epoch": DECODE_EPOCH}
End = Literal["server", "ranks", "decode"]
M = TypeVar("M", bound=msgspec.Struct)


def run_spec(record: Path | None = None, **changes: Any) -> RunSpec:
    config = EngineConfig(
        model_path=Path("/models/tiny"),
        page_size=PAGE_SIZE,
        chunked_prefill_size=8,
        attention_context_parallel_size=CP_SIZE,
        enable_nsa_prefill_context_parallel=True,
        enable_nsa_prefill_cp_shared_kv=True,
        record_batches=record,
        **changes,
    )
    return RunSpec(
        run_id="test",
        run_dir="/nowhere",
        supervisor_pid=1,
        config=config.as_plain(),
        limits=EngineLimits(
            page_size=PAGE_SIZE,
            cp_size=CP_SIZE,
            shared=True,
            physical_tokens_per_rank=20,
            decode_tokens=48,
            context_length=44,
            scratch_limit_bytes=0,
            max_prefix_pages=10,
            pool_bytes_per_rank=0,
            decode_pool_bytes=0,
        ),
        page_layout=PageLayout(
            latent_format="l", index_format="i", num_layers=1, index_layers=(), bytes_per_page=1
        ),
        model_fingerprint="m",
        vocab_size=VOCAB,
        eos_token_ids=(0,),
    )


class Controller:
    """A controller of two ranks; what it sends is kept in order, with its receiver."""

    def __init__(self, record: Path | None = None, **changes: Any) -> None:
        self.sent: list[tuple[End, msgspec.Struct]] = []
        self.controller = PrefillController(
            run_spec(record, **changes),
            epoch=EPOCH,
            to_server=lambda message: self.sent.append(("server", message)),
            to_ranks=lambda message: self.sent.append(("ranks", message)),
        )
        self.peer = DecodePeer(
            DECODE, DECODE_EPOCH, send=lambda message: self.sent.append(("decode", message))
        )
        self.controller.paired(self.peer)
        assert self.take() == [("server", Paired(decode=str(DECODE)))]

    def take(self) -> list[tuple[End, msgspec.Struct]]:
        """What was sent since the last call."""
        taken, self.sent = self.sent, []
        self.controller.scheduler.check_invariants()
        return taken

    def taken(self, kind: type[M]) -> list[M]:
        return [message for _, message in self.take() if isinstance(message, kind)]

    def submit(
        self, room: int, tokens: int = 6, max_tokens: int = 3, first: int = 1, **sampling: Any
    ) -> None:
        self.controller.on_server(
            Submit(
                decode=str(DECODE),
                room=room,
                token_ids=pack_int64(np.arange(first, first + tokens)),
                max_tokens=max_tokens,
                sampling=SamplingParams(**sampling),
            )
        )

    def reserve(self, room: int, pages: int = 2, first_position: int = 0) -> None:
        self.controller.on_decode(
            self.peer,
            Reserve(
                **FROM_DECODE,
                room=room,
                first_position=first_position,
                physical_pages=pack_int64(np.arange(1, 1 + pages)),
            ),
        )

    def start(self, room: int, tokens: int = 6) -> Batch:
        """Bring a room into its first forward pass."""
        self.submit(room, tokens)
        self.reserve(room, -(-tokens // PAGE_SIZE))
        return self.step()

    def step(self) -> Batch:
        assert self.controller.step()
        batch = self.sent[-1][1]
        assert isinstance(batch, Batch)
        return batch

    def done(
        self, batch: Batch, rank: int, *tokens: tuple[int, int], without: Sequence[int] = ()
    ) -> None:
        self.controller.on_rank(
            BatchDone(
                rank=rank,
                batch_id=batch.batch_id,
                tokens=[RoomToken(room=room, token_id=token) for room, token in tokens],
                without_token=list(without),
                scratch_bytes=10 * (rank + 1),
                read_bytes_total=1000 * (rank + 1),
            )
        )

    def conclude(self, room: int, rank: int, failure: str | None = None) -> None:
        self.controller.on_rank(
            RoomConcluded(
                rank=rank,
                room=room,
                pages=rank + 1,
                descriptors=3,
                bytes=100 + rank,
                failure=failure,
            )
        )

    def cancel(self, room: int) -> None:
        self.controller.on_server(Cancel(room=room))

    def stats(self) -> PrefillStats:
        self.controller.on_server(StatsRequest(ticket=5))
        (stats,) = self.taken(PrefillStats)
        return stats


def stop(room: int, reason: str) -> AbortRoom:
    return AbortRoom(**TO_DECODE, room=room, reason=reason)


def withdrawn(room: int, reason: str) -> Withdrawn:
    return Withdrawn(**TO_DECODE, room=room, reason=reason)


def refused(room: int, reason: str, kind: RefusalKind = "failed") -> RoomRefused:
    return RoomRefused(room=room, kind=kind, reason=reason)


GONE = "the client went away"

# The way of a request ----------------------------------------------------------------------------


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


def test_a_chunk_that_is_not_the_last_gives_no_token() -> None:
    group = Controller()
    batch = group.start(1, tokens=12)
    for rank in range(CP_SIZE):
        group.done(batch, rank)
    assert group.taken(FirstToken) == []
    batch = group.step()
    group.done(batch, 0, (1, 9))
    group.done(batch, 1)
    assert group.taken(FirstToken) == [FirstToken(**TO_DECODE, room=1, token_id=9)]


def test_the_cached_prefix_is_told_to_the_server() -> None:
    group = Controller()
    batch = group.start(1, tokens=8)
    for rank in range(CP_SIZE):
        group.done(batch, rank)
    group.start(2, tokens=9)
    assert group.taken(Admitted) == [
        Admitted(room=1, cached_tokens=0),
        Admitted(room=2, cached_tokens=8),
    ]


def test_a_transfer_is_logged_by_rank_once_all_have_concluded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group = Controller()
    batch = group.start(1)
    for rank in range(CP_SIZE):
        group.done(batch, rank)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="cp_shared_kv"):
        group.conclude(1, 1)
        assert caplog.messages == []
        group.conclude(1, 0)
    assert caplog.messages == [
        "CP shared KV transfer: rank=0 sent pages=1 descriptors=3 bytes=100",
        "CP shared KV transfer: rank=1 sent pages=2 descriptors=3 bytes=101",
    ]


def test_a_failed_rank_is_not_logged_as_having_sent(caplog: pytest.LogCaptureFixture) -> None:
    group = Controller()
    batch = group.start(1)
    for rank in range(CP_SIZE):
        group.done(batch, rank)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="cp_shared_kv"):
        group.conclude(1, 0)
        group.conclude(1, 1, failure="the wire broke")
    assert caplog.messages == [
        "CP shared KV transfer: rank=0 sent pages=1 descriptors=3 bytes=100",
        "CP shared KV transfer: rank=1 failed: the wire broke",
    ]


def test_the_figures_are_those_of_the_pool_and_the_ranks() -> None:
    group = Controller()
    stats = group.stats()
    assert (stats.ticket, stats.available_tokens, stats.locked_tokens) == (5, 40, 0)
    batch = group.start(1, tokens=8)
    group.submit(2)
    stats = group.stats()
    assert (stats.available_tokens, stats.cached_tokens, stats.locked_tokens) == (32, 0, 8)
    assert (stats.queued, stats.running) == (1, 1)
    assert stats.free_pages_per_owner == [4, 4]
    for rank in range(CP_SIZE):
        group.done(batch, rank)
        group.conclude(1, rank)
    stats = group.stats()
    assert (stats.available_tokens, stats.cached_tokens, stats.locked_tokens) == (32, 8, 0)
    assert (stats.prompt_tokens_total, stats.cached_tokens_total) == (8, 0)
    assert stats.sent_pages_total == [1, 2]
    assert stats.sent_descriptors_total == [3, 3]
    assert stats.sent_bytes_total == [100, 101]
    assert stats.scratch_bytes == [10, 20]
    assert stats.read_bytes_total == [1000, 2000]
    assert stats.failed_rooms_total == 0


def test_a_recording_holds_openings_and_batches_in_the_order_of_their_sending(
    tmp_path: Path,
) -> None:
    group = Controller(tmp_path)
    for room in (1, 2):
        group.submit(room, tokens=8, first=10 * room)
        group.reserve(room)
    for _ in range(2):
        batch = group.step()
        for rank in range(CP_SIZE):
            group.done(batch, rank)
    to_ranks = [message for end, message in group.take() if end == "ranks"]
    assert [type(message) for message in to_ranks] == [OpenRoom, Batch, OpenRoom, Batch]
    recorded = [RECORDED.decode(data) for data in read_messages(tmp_path / "prefill.messages")]
    assert recorded == to_ranks


# Refusals ----------------------------------------------------------------------------------------


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


# Aborts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reserved", [False, True])
def test_a_request_that_no_rank_has_heard_of_is_withdrawn(reserved: bool) -> None:
    group = Controller()
    group.submit(1)
    if reserved:
        group.reserve(1)
    group.take()
    group.cancel(1)
    assert group.take() == [("decode", withdrawn(1, GONE)), ("server", refused(1, GONE))]
    assert not group.controller.step()


def test_a_reservation_that_comes_too_late_is_given_back() -> None:
    group = Controller()
    group.submit(1)
    group.cancel(1)
    group.take()
    group.reserve(1)
    ((end, message),) = group.take()
    assert end == "decode"
    assert isinstance(message, Withdrawn)
    assert message.room == 1


def test_a_request_in_flight_is_stopped_at_ranks_and_decode_and_refused_at_the_end() -> None:
    group = Controller()
    batch = group.start(1, tokens=12)
    group.take()
    group.cancel(1)
    assert group.take() == [("ranks", stop(1, GONE)), ("decode", stop(1, GONE))]
    for rank in range(CP_SIZE):
        group.done(batch, rank)
    assert not group.controller.step()
    group.conclude(1, 0, failure=GONE)
    assert group.take() == []
    group.conclude(1, 1, failure=GONE)
    assert group.take() == [("server", refused(1, GONE))]


def test_a_stopped_prompt_gives_no_first_token_though_its_last_chunk_was_computed() -> None:
    group = Controller()
    batch = group.start(1)
    group.cancel(1)
    group.done(batch, 0, (1, 42))
    group.done(batch, 1)
    assert group.taken(FirstToken) == []


def test_a_request_between_two_batches_is_stopped_like_one_in_flight() -> None:
    group = Controller()
    batch = group.start(1, tokens=12)
    for rank in range(CP_SIZE):
        group.done(batch, rank)
    group.take()
    group.cancel(1)
    assert group.take() == [("ranks", stop(1, GONE)), ("decode", stop(1, GONE))]
    assert not group.controller.step()
    for rank in range(CP_SIZE):
        group.conclude(1, rank, failure=GONE)
    assert group.taken(RoomRefused) == [refused(1, GONE)]


def test_a_request_that_is_being_sent_is_stopped_until_all_have_concluded() -> None:
    group = Controller()
    batch = group.start(1)
    for rank in range(CP_SIZE):
        group.done(batch, rank)
    group.conclude(1, 0)
    group.take()
    group.cancel(1)
    assert group.take() == [("ranks", stop(1, GONE)), ("decode", stop(1, GONE))]
    assert group.stats().locked_tokens == 8  # rank 1 may still read them
    group.conclude(1, 1)  # it had sent everything before it heard
    assert group.taken(RoomRefused) == [refused(1, GONE)]
    assert group.stats().locked_tokens == 0


def test_a_request_that_is_decodes_alone_is_stopped_by_decode() -> None:
    """The server tells both."""
    group = Controller()
    batch = group.start(1)
    for rank in range(CP_SIZE):
        group.done(batch, rank)
        group.conclude(1, rank)
    group.take()
    group.cancel(1)
    assert group.take() == []


def test_decode_stops_a_room_at_the_ranks() -> None:
    group = Controller()
    group.start(1)
    group.take()
    group.controller.on_decode(group.peer, AbortRoom(**FROM_DECODE, room=1, reason="sent twice"))
    assert ("ranks", stop(1, "sent twice")) in group.take()


def test_decode_hears_that_a_room_it_stops_is_open_at_no_rank() -> None:
    group = Controller()
    group.controller.on_decode(group.peer, AbortRoom(**FROM_DECODE, room=9, reason="too late"))
    ((end, message),) = group.take()
    assert end == "decode"
    assert isinstance(message, Withdrawn)
    assert message.room == 9


def test_one_failed_rank_stops_the_others_and_is_the_reason() -> None:
    group = Controller()
    batch = group.start(1, tokens=20)
    for rank in range(CP_SIZE):
        group.done(batch, rank)
    batch = group.step()
    group.take()
    group.conclude(1, 1, failure="the wire broke")
    broke = stop(1, "the wire broke")
    assert group.take() == [("ranks", broke), ("decode", broke)]
    for rank in range(CP_SIZE):
        group.done(batch, rank)
    assert not group.controller.step()  # the rest would be in vain
    group.conclude(1, 0, failure="told to stop")
    assert group.take() == [("server", refused(1, "the wire broke"))]
    assert group.stats().locked_tokens == 0


def test_a_room_that_failed_at_all_ranks_ends_with_the_batch_in_flight() -> None:
    group = Controller()
    batch = group.start(1, tokens=20)
    for rank in range(CP_SIZE):
        group.done(batch, rank)
    batch = group.step()
    for rank in range(CP_SIZE):
        group.conclude(1, rank, failure="the wire broke")
    group.take()
    for rank in range(CP_SIZE):
        group.done(batch, rank)
    assert group.take() == [("server", refused(1, "the wire broke"))]
    assert group.controller.scheduler.get(1) is None


def test_a_neighbour_in_the_same_batch_goes_on_when_one_is_stopped() -> None:
    group = Controller()
    group.submit(1, tokens=3)
    group.submit(2, tokens=4, first=20)
    group.reserve(1, pages=1)
    group.reserve(2, pages=1)
    batch = group.step()
    assert [part.room for part in batch.requests] == [1, 2]
    group.cancel(1)
    group.done(batch, 0, (1, 8), (2, 9))
    group.done(batch, 1)
    assert group.taken(FirstToken) == [FirstToken(**TO_DECODE, room=2, token_id=9)]


def test_a_flush_drops_what_no_request_uses_and_tells_how_much() -> None:
    group = Controller()
    batch = group.start(1, tokens=8)
    for rank in range(CP_SIZE):
        group.done(batch, rank)
        group.conclude(1, rank)
    group.start(2, tokens=5)
    assert group.stats().cached_tokens == 4  # of the first request's two pages one is in use
    group.controller.on_server(Flush(ticket=9))
    assert group.taken(Flushed) == [Flushed(ticket=9, pages=1)]
    assert group.stats().cached_tokens == 0
    group.controller.on_server(Flush(ticket=10))
    assert group.taken(Flushed) == [Flushed(ticket=10, pages=0)]


def test_a_page_map_tells_each_owners_pages_by_state() -> None:
    group = Controller()
    batch = group.start(1, tokens=8)
    for rank in range(CP_SIZE):
        group.done(batch, rank)
        group.conclude(1, rank)
    group.start(2, tokens=5)  # on a cached page of the first request, and one more
    group.controller.on_server(PageMapRequest(ticket=4, most_bins=2))
    (told,) = group.taken(ToldPageMap)
    assert (told.ticket, told.epoch) == (4, EPOCH)
    assert (told.physical_pages, told.pages_per_bin) == (5, 3)
    stats = group.stats()
    assert [sum(row) for row in told.free] == stats.free_pages_per_owner
    assert sum(map(sum, told.cached)) * PAGE_SIZE == stats.cached_tokens == 4
    held = 2 * 5 - sum(map(sum, told.free)) - sum(map(sum, told.cached))
    assert held * PAGE_SIZE == stats.locked_tokens == 8


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


# Other processes come and go ---------------------------------------------------------------------


def test_a_prompt_for_a_decode_worker_that_is_not_paired_is_refused_as_unavailable() -> None:
    group = Controller()
    group.controller.on_server(
        Submit(
            room=1,
            decode=str(DECODE.next()),
            token_ids=pack_int64(np.arange(1, 7)),
            max_tokens=1,
            sampling=SamplingParams(),
        )
    )
    ((end, answer),) = group.take()
    assert end == "server"
    assert isinstance(answer, RoomRefused)
    assert answer.kind == "unavailable"
    assert str(DECODE.next()) in answer.reason


def test_a_new_server_hears_who_this_is_and_where_it_can_send() -> None:
    group = Controller()
    group.controller.introduce()
    assert group.take() == [("server", Registered()), ("server", Paired(decode=str(DECODE)))]


def test_all_requests_of_a_lost_decode_worker_may_begin_again_at_once() -> None:
    group = Controller()
    batch = group.start(1)
    group.submit(2)
    group.submit(3)
    group.reserve(3)
    group.take()
    group.controller.decode_lost(DECODE, "it was killed")
    assert group.take() == [
        ("server", refused(1, "it was killed", kind="unavailable")),
        ("server", refused(2, "it was killed", kind="unavailable")),
        ("server", refused(3, "it was killed", kind="unavailable")),
        ("ranks", DisconnectDecode(decode_epoch=DECODE_EPOCH, reason="it was killed")),
    ]
    # The room in flight is over when its batch is done and no rank touches its pages any more.
    for rank in range(CP_SIZE):
        group.conclude(1, rank, failure="it was killed")
    assert group.controller.scheduler.pool.locked_pages > 0
    for rank in range(CP_SIZE):
        group.done(batch, rank, (1, 42))
    assert group.take() == []  # the server knows
    assert group.controller.scheduler.pool.locked_pages == 0
    group.controller.decode_lost(DECODE, "told twice")
    assert group.take() == []


def test_requests_of_another_decode_worker_go_on_when_one_is_lost() -> None:
    group = Controller()
    sent: list[msgspec.Struct] = []
    other = DecodePeer(Life("decode", 1, 1), DECODE_EPOCH + 1, send=sent.append)
    group.controller.paired(other)
    group.controller.on_server(
        Submit(
            room=1,
            decode=str(other.life),
            token_ids=pack_int64(np.arange(1, 7)),
            max_tokens=1,
            sampling=SamplingParams(),
        )
    )
    group.take()
    group.controller.decode_lost(DECODE, "it was killed")
    assert [end for end, _ in group.take()] == ["ranks"]
    (offer,) = sent
    assert isinstance(offer, Offer)
    assert offer.peer_epoch == other.epoch
    with pytest.raises(ProtocolError, match=r"decode-0\.1 speaks of a room of decode-1\.1"):
        group.reserve(1)
    request = group.controller.scheduler.get(1)
    assert request is not None
    assert request.reservation is None


def test_without_a_server_every_request_is_stopped() -> None:
    group = Controller()
    group.start(1)
    group.submit(2)
    group.take()
    group.controller.server_lost("the server was killed")
    assert group.take() == [
        ("ranks", stop(1, "the server was killed")),
        ("decode", stop(1, "the server was killed")),
        ("decode", withdrawn(2, "the server was killed")),
        ("server", refused(2, "the server was killed")),
    ]


# Self-check --------------------------------------------------------------------------------------


def test_pages_that_no_request_holds_are_a_problem() -> None:
    group = Controller()
    assert group.controller.problems() == []
    group.controller.scheduler.pool.admit(77, np.zeros(0, "V16"), 2)
    group.controller.on_server(Check(ticket=3))
    ((end, answer),) = group.sent
    assert end == "server"
    assert isinstance(answer, Checked)
    assert answer.ticket == 3
    (problem,) = answer.problems
    assert "rooms that hold pages are not the running ones" in problem


def test_what_is_wrong_at_a_rank_is_told_until_it_is_right_again() -> None:
    group = Controller()
    group.controller.on_rank(RankState(rank=1, open_rooms=[], problem="a write has no room"))
    assert group.controller.problems() == ["rank 1: a write has no room"]
    group.controller.on_rank(RankState(rank=1, open_rooms=[]))
    assert group.controller.problems() == []


def test_a_room_that_only_a_rank_still_has_is_a_problem_after_a_while() -> None:
    group = Controller()
    group.start(1)
    for _ in range(20):  # an open request is none
        group.controller.on_rank(RankState(rank=0, open_rooms=[1]))
    assert group.controller.problems() == []
    for count in range(11):
        assert group.controller.problems() == [], count
        group.controller.on_rank(RankState(rank=0, open_rooms=[1, 55]))
    assert group.controller.problems() == ["rank 0 holds room 55, which has long been over"]
    group.controller.on_rank(RankState(rank=1, open_rooms=[55]))
    group.controller.on_rank(RankState(rank=0, open_rooms=[1]))
    assert group.controller.problems() == []


# Lies ---------------------------------------------------------------------------------------------


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
    for rank in range(CP_SIZE):
        group.done(batch, rank)
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
    stats = group.stats()
    assert stats.failed_rooms_total == 1
    assert stats.cached_tokens == PAGE_SIZE  # room 2's alone


def test_a_room_without_a_token_that_is_not_at_its_end_goes_on() -> None:
    group = Controller()
    batch = group.start(1, tokens=12)
    group.take()
    for rank in range(CP_SIZE):
        group.done(batch, rank, without=[1])
    assert group.take() == []
    assert [part.room for part in group.step().requests] == [1]


@pytest.mark.parametrize("reason", ["", "x" * 50_000])
def test_whatever_a_process_died_of_its_rooms_can_be_told(reason: str) -> None:
    group = Controller()
    group.start(1)
    group.submit(2)
    group.take()
    group.controller.server_lost(reason)
    told = group.take()
    group.controller.decode_lost(DECODE, reason)
    told += group.take()
    assert {type(message) for _, message in told} == {
        AbortRoom,
        Withdrawn,
        RoomRefused,
        DisconnectDecode,
    }
    codecs = {"ranks": TO_RANK, "decode": TO_DECODE_CODEC, "server": TO_SERVER}
    for end, message in told:
        assert codecs[end].decode(encode(message)) == message

"""One valid message of every kind that processes send each other, for tests of decoders."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from cp_shared_kv.engine import messages as engine
from cp_shared_kv.engine import satellite_messages as satellite
from cp_shared_kv.engine.batch import Batch, BatchRequest
from cp_shared_kv.engine.limits import EngineLimits
from cp_shared_kv.engine.run_spec import PageLayout
from cp_shared_kv.transfer.codec import pack_int64
from cp_shared_kv.transfer.messages import (
    AbortRoom,
    Acknowledged,
    Concluded,
    Declined,
    FirstToken,
    Hello,
    Message,
    Offer,
    OpenRoom,
    Quiesced,
    Released,
    Reserve,
    Sent,
    Withdrawn,
)
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.sampling_params import SampledLogprobs, SamplingParams


def ints(*values: int) -> bytes:
    """An int64 array as it travels."""
    return pack_int64(np.array(values, dtype=np.int64))


ROOM: dict[str, Any] = {"epoch": 11, "peer_epoch": 22, "room": 7}
HELLO = Hello(
    epoch=11,
    role="decode",
    session_id="decode-0",
    transport="shared_memory",
    cp_size=1,
    page_size=64,
    latent_format="fp32 r512 d64",
    index_format="fp32 d128",
    num_layers=2,
    index_layers=(0, 1),
    bytes_per_page=1000,
    model_fingerprint="tiny",
    physical_pages=9,
    regions=(Region("decode-0-11", 10_000),),
)
TRANSFER_MESSAGES: list[Message] = [
    HELLO,
    Offer(
        **ROOM,
        token_ids=ints(1, 2, 3),
        max_tokens=5,
        sampling=SamplingParams(temperature=0.5, ignore_eos=True, seed=1),
    ),
    FirstToken(
        **ROOM, token_id=65, logprobs=SampledLogprobs(logprob=-0.5, top=((66, -0.25), (65, -0.5)))
    ),
    Withdrawn(**ROOM, reason="client gone"),
    Reserve(**ROOM, first_position=2, physical_pages=ints(4, 9)),
    Declined(**ROOM, reason="too long"),
    Released(**ROOM),
    OpenRoom(
        epoch=11,
        room=7,
        decode_epoch=22,
        first_position=2,
        physical_pages=ints(4, 9),
        total_positions=4,
        sampling=SamplingParams(repetition_penalty=1.1, logit_bias=((3, -1.0),)),
        prompt_token_ids=ints(1, 3),
    ),
    Sent(**ROOM, rank=3, chunk=0, positions=ints(0, 5), descriptors=2, nbytes=84_000),
    Concluded(**ROOM, rank=3, outcome="success", quiescent=True, sent_chunks=1, total_positions=2),
    Concluded(
        **ROOM,
        rank=3,
        outcome="failed",
        reason="no route",
        quiescent=False,
        sent_chunks=0,
        total_positions=0,
    ),
    Quiesced(**ROOM, rank=3),
    Acknowledged(**ROOM, rank=3, of="concluded"),
    AbortRoom(**ROOM, reason="client gone"),
]

_LOGPROBS = SampledLogprobs(logprob=-0.5, top=((3, -0.25),))
_SAMPLING = SamplingParams(temperature=0.5, stop_token_ids=(3,), logit_bias=((4, 1.5),), seed=9)
PREFILL_STATS = engine.PrefillStats(
    ticket=1,
    available_tokens=40,
    cached_tokens=24,
    locked_tokens=16,
    free_pages_per_owner=[5, 5],
    queued=1,
    running=2,
    prompt_tokens_total=30,
    cached_tokens_total=8,
    evicted_pages_total=3,
    sent_pages_total=[4, 5],
    sent_descriptors_total=[1, 2],
    sent_bytes_total=[10, 20],
    read_bytes_total=[30, 40],
    scratch_bytes=[7, 7],
)
DECODE_STATS = engine.DecodeStats(
    ticket=1,
    used_tokens=20,
    waiting=3,
    running=4,
    generated_tokens_total=50,
    failed_transfers_total=7,
)
ENGINE_MESSAGES: list[msgspec.Struct] = [
    engine.Submit(
        room=7, decode="decode-0.1", token_ids=ints(1, 2), max_tokens=4, sampling=_SAMPLING
    ),
    engine.Cancel(room=7),
    engine.StatsRequest(ticket=1),
    engine.PageMapRequest(ticket=4, most_bins=8),
    engine.Flush(ticket=2),
    engine.Check(ticket=3),
    engine.Registered(),
    engine.Paired(decode="decode-0.1"),
    engine.Tokens(room=7, token_ids=[3], finish_reason="length", logprobs=[_LOGPROBS]),
    engine.Admitted(room=7, cached_tokens=64),
    engine.RoomRefused(room=7, kind="failed", reason="lost"),
    PREFILL_STATS,
    DECODE_STATS,
    engine.ToldPageMap(
        ticket=4,
        epoch=11,
        physical_pages=5,
        pages_per_bin=2,
        free=[[2, 1, 0], [0, 0, 1]],
        cached=[[0, 1, 0], [2, 0, 0]],
    ),
    engine.Flushed(ticket=2, pages=5),
    engine.Checked(ticket=0, problems=["a page is nowhere"]),
    engine.Configure(
        epoch=11, shared=True, physical_pages=9, kv_read="pull", scratch_limit_bytes=1000
    ),
    engine.ConnectDecode(address="ipc:///run/decode.sock", hello=HELLO),
    engine.DisconnectDecode(decode_epoch=22, reason="killed"),
    engine.RankReady(rank=1),
    engine.Configured(rank=1, epoch=11, pool_bytes=10_000),
    engine.DecodeConnected(rank=1, decode_epoch=22, failure="no such segment"),
    engine.BatchDone(
        rank=1,
        batch_id=5,
        tokens=[engine.RoomToken(room=7, token_id=3, logprobs=_LOGPROBS)],
        without_token=[8],
        scratch_bytes=100,
    ),
    engine.RoomConcluded(rank=1, room=7, pages=2, descriptors=4, bytes=200, failure="lost"),
    engine.RankState(rank=1, open_rooms=[7], problem="a write is nowhere"),
    engine.BeginReplay(prefill_epoch=11, record="/tmp/recording"),  # noqa: S108  (never opened)
    engine.ReplayReady(),
    engine.RoomCovered(room=7),
    engine.StepDone(batch_id=5),
    engine.ProcessUp(life="decode-0.1", address="ipc:///run/decode.sock"),
    engine.ProcessDown(life="decode-0.1", reason="killed"),
    satellite.Join(release="0.1.0", host="10.0.0.6", workers=2),
    satellite.Leave(reason="it was stopped"),
    satellite.Terms(
        config={"page_size": 4, "dtype": "auto", "verify_kv_transfer": False, "api_key": None},
        limits=EngineLimits(
            page_size=4,
            cp_size=2,
            shared=True,
            physical_tokens_per_rank=40,
            decode_tokens=80,
            context_length=100,
            scratch_limit_bytes=1000,
            max_prefix_pages=20,
            pool_bytes_per_rank=10_000,
            decode_pool_bytes=20_000,
        ),
        page_layout=PageLayout(
            latent_format="fp32 r512 d64",
            index_format="fp32 d128",
            num_layers=2,
            index_layers=(0, 1),
            bytes_per_page=1000,
        ),
        model_fingerprint="tiny",
        lives=("decode-1.1", "decode-2.1"),
    ),
    satellite.Condemned(life="decode-1.1", reason="out of reach"),
    satellite.Dismissed(reason="silent"),
    satellite.Refused(reason="another release"),
    satellite.RunOver(reason="it was stopped"),
    satellite.StillHere(),
    Batch(
        epoch=11,
        batch_id=5,
        token_ids=ints(1, 2, 3),
        requests=[
            BatchRequest(
                room=7,
                prefix_tokens=0,
                new_tokens=3,
                logical_pages=ints(4),
                chunk=0,
                send_start=0,
                send_stop=1,
                last=True,
            )
        ],
    ),
]

"""What the engine's processes say to each other, apart from the KV transfer's own messages.

Tagged msgspec structs over zmq; no pickle. Which of them may travel where: codecs.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cp_shared_kv.engine.api import FinishReason, RefusalKind
from cp_shared_kv.transfer.messages import Hello
from cp_shared_kv.transfer.sampling_params import SampledLogprobs, SamplingParams


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


# Server -> controller and decode ---------------------------------------------------------------


class Submit(_Message, frozen=True, kw_only=True, tag="submit"):
    """A prompt (int64 tokens); the server chose its room and its decode worker (a life)."""

    room: int
    decode: str
    token_ids: bytes
    max_tokens: int
    sampling: SamplingParams


class Cancel(_Message, frozen=True, kw_only=True, tag="cancel"):
    """The client went away. To the room's controller, or to decode if that one is gone."""

    room: int


class StatsRequest(_Message, frozen=True, kw_only=True, tag="stats_request"):
    """Asks for the figures of one process; `ticket` comes back with them."""

    ticket: int


class Flush(_Message, frozen=True, kw_only=True, tag="flush"):
    """Drop every cached prefix that no request uses; `ticket` comes back with the answer."""

    ticket: int


class Check(_Message, frozen=True, kw_only=True, tag="check"):
    """Check your books now; `ticket` comes back with what does not add up."""

    ticket: int


# Controller and decode -> server ---------------------------------------------------------------


class Registered(_Message, frozen=True, kw_only=True, tag="registered"):
    """A process is reachable at this identity, which is its life."""


class Paired(_Message, frozen=True, kw_only=True, tag="paired"):
    """A prefill group can send to this life of a decode worker."""

    decode: str


class Tokens(_Message, frozen=True, kw_only=True, tag="tokens"):
    """New output tokens of a room, in order."""

    room: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[SampledLogprobs] | None = None
    """One for each of `token_ids`, when the request asked for them."""


class Admitted(_Message, frozen=True, kw_only=True, tag="admitted"):
    """How much of a prompt was found in the prefix cache."""

    room: int
    cached_tokens: int


class RoomRefused(_Message, frozen=True, kw_only=True, tag="room_refused"):
    """A request that ends without its tokens, and why."""

    room: int
    kind: RefusalKind
    reason: str


class PrefillStats(_Message, frozen=True, kw_only=True, tag="prefill_stats"):
    """Figures of a prefill group. Tokens are logical; lists run over the CP ranks."""

    ticket: int
    available_tokens: int
    cached_tokens: int
    locked_tokens: int
    free_pages_per_owner: list[int]
    queued: int
    running: int
    prompt_tokens_total: int
    cached_tokens_total: int
    evicted_pages_total: int
    sent_pages_total: list[int]
    sent_descriptors_total: list[int]
    sent_bytes_total: list[int]
    scratch_bytes: list[int]
    failed_rooms_total: int


class DecodeStats(_Message, frozen=True, kw_only=True, tag="decode_stats"):
    """Figures of a decode worker."""

    ticket: int
    available_tokens: int
    used_tokens: int
    waiting: int
    running: int
    generated_tokens_total: int
    finished_total: int
    failed_rooms_total: int


class Flushed(_Message, frozen=True, kw_only=True, tag="flushed"):
    """So many logical pages were dropped."""

    ticket: int
    pages: int


class Checked(_Message, frozen=True, kw_only=True, tag="checked"):
    """What does not add up in this process's books; `ticket` 0 is unasked."""

    ticket: int
    problems: list[str]


# Controller -> ranks ---------------------------------------------------------------------------


class Configure(_Message, frozen=True, kw_only=True, tag="configure"):
    """Make a new pool and forget the old one; the start of an epoch. Every rank gets the same."""

    epoch: int
    shared: bool
    physical_pages: int
    kv_read: Literal["pull", "collective", "local"]
    scratch_limit_bytes: int
    record: str | None = None
    """Directory for this rank's logits, when the run is recorded."""
    flip_byte_before_batch: int | None = None
    """Test aid: damage one byte of a prefix page before this batch. A proof must notice."""


class ConnectDecode(_Message, frozen=True, kw_only=True, tag="connect_decode"):
    """Map the pool of a decode worker that the controller has shaken hands with."""

    address: str
    hello: Hello


class DisconnectDecode(_Message, frozen=True, kw_only=True, tag="disconnect_decode"):
    """A decode worker's process is gone: its rooms end, and nobody is told."""

    decode_epoch: int
    reason: str


# Ranks -> controller ---------------------------------------------------------------------------


class RankReady(_Message, frozen=True, kw_only=True, tag="rank_ready"):
    """The rank has loaded its weights and waits for `Configure`."""

    rank: int


class Configured(_Message, frozen=True, kw_only=True, tag="configured"):
    """The rank's pool of this epoch stands."""

    rank: int
    epoch: int
    pool_bytes: int


class DecodeConnected(_Message, frozen=True, kw_only=True, tag="decode_connected"):
    """The rank can write to a decode worker's pool, or why it cannot."""

    rank: int
    decode_epoch: int
    failure: str | None = None


class RoomToken(_Message, frozen=True, kw_only=True):
    """The first output token of a room."""

    room: int
    token_id: int
    logprobs: SampledLogprobs | None = None


class BatchDone(_Message, frozen=True, kw_only=True, tag="batch_done"):
    """The rank has computed a batch and written its pages."""

    rank: int
    batch_id: int
    tokens: list[RoomToken]
    scratch_bytes: int


class RoomConcluded(_Message, frozen=True, kw_only=True, tag="room_concluded"):
    """The rank will touch the room's pages no more."""

    rank: int
    room: int
    pages: int
    descriptors: int
    bytes: int
    failure: str | None = None


class RankState(_Message, frozen=True, kw_only=True, tag="rank_state"):
    """Sent about once a second: the rooms this rank has open, and what is wrong in its books."""

    rank: int
    open_rooms: list[int]
    problem: str | None = None


# Replay tool <-> decode ------------------------------------------------------------------------


class BeginReplay(_Message, frozen=True, kw_only=True, tag="begin_replay"):
    """Drop everything, and do only what is told from now on (engine/replay.py).

    `prefill_epoch` is the life of the group whose pages will come.
    """

    prefill_epoch: int
    record: str


class ReplayReady(_Message, frozen=True, kw_only=True, tag="replay_ready"):
    """Decode is empty and in replay."""


class RoomCovered(_Message, frozen=True, kw_only=True, tag="room_covered"):
    """A replayed room has all its pages at decode."""

    room: int


class StepDone(_Message, frozen=True, kw_only=True, tag="step_done"):
    """Decode has run one replayed batch."""

    batch_id: int


# Supervisor -> controllers, decode workers and server ------------------------------------------


class ProcessUp(_Message, frozen=True, kw_only=True, tag="process_up"):
    """A life of a decode worker or of the server can be reached at this address."""

    life: str
    address: str


class ProcessDown(_Message, frozen=True, kw_only=True, tag="process_down"):
    """A life is over: every process of it was reaped."""

    life: str
    reason: str

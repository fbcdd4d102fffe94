"""What the engine's processes say to each other, apart from the KV transfer's own messages.

Tagged msgspec structs over zmq; no pickle. Which of them may travel where: codecs.py.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cp_shared_kv.engine.api import FinishReason, RefusalKind
from cp_shared_kv.engine.config_values import KVReader
from cp_shared_kv.engine.lives import PATTERN
from cp_shared_kv.transfer.messages import (
    INT64_MAX,
    MAX_PAGE,
    Bytes,
    Count,
    Epoch,
    Hello,
    Rank,
    Reason,
    RoomId,
)
from cp_shared_kv.transfer.sampling_params import SampledLogprobs, SamplingParams, TokenId

Number = Annotated[int, Meta(ge=0, le=INT64_MAX)]
"""A ticket, or a total over one life."""
LifeName = Annotated[str, Meta(pattern=rf"\A{PATTERN}\Z")]
"""A life as `str` gives it: whoever has decoded one may parse it."""
Address = Annotated[str, Meta(min_length=1, max_length=200)]
"""Where a process is reached: `ipc://` within a host, `tcp://` from another."""
MOST_BINS = 4096
"""A page map has no more ranges than these."""
OneRoomBytes = Annotated[int, Meta(ge=0, le=1 << 50)]
"""What one rank sends for one room: totals over a life stay far from the end of int64."""
NO_NUMBERS = (
    "the model gave no number for the next token: its logits hold NaN or infinity; to change it: "
    "look for NaN and infinity in the checkpoint's weights, or take a wider --dtype"
)
"""Why a request ends whose logits offer no choice. Others in its batch go on."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


# Server -> controller and decode ---------------------------------------------------------------


class Submit(_Message, frozen=True, kw_only=True, tag="submit"):
    """A prompt (int64 tokens); the server chose its room and its decode worker (a life)."""

    room: RoomId
    decode: LifeName
    token_ids: bytes
    max_tokens: Count
    sampling: SamplingParams


class Cancel(_Message, frozen=True, kw_only=True, tag="cancel"):
    """The server wants no more of a room: its client has all it wants or is gone, or the request
    begins again under another number. To the room's controller and its decode worker."""

    room: RoomId


class StatsRequest(_Message, frozen=True, kw_only=True, tag="stats_request"):
    """Asks for the figures of one process; `ticket` comes back with them."""

    ticket: Number


class PageMapRequest(_Message, frozen=True, kw_only=True, tag="page_map_request"):
    """Asks which pages of a pool are in which state; `ticket` comes back with the counts."""

    ticket: Number
    most_bins: Annotated[int, Meta(ge=1, le=MOST_BINS)]
    """In so many ranges of physical pages an owner, or fewer."""


class Flush(_Message, frozen=True, kw_only=True, tag="flush"):
    """Drop every cached prefix that no request uses; `ticket` comes back with the answer."""

    ticket: Number


class Check(_Message, frozen=True, kw_only=True, tag="check"):
    """Check your books now; `ticket` comes back with what does not add up."""

    ticket: Number


# Controller and decode -> server ---------------------------------------------------------------


class Registered(_Message, frozen=True, kw_only=True, tag="registered"):
    """A process is reachable at this identity, which is its life."""


class Paired(_Message, frozen=True, kw_only=True, tag="paired"):
    """A prefill group can send to this life of a decode worker."""

    decode: LifeName


class Tokens(_Message, frozen=True, kw_only=True, tag="tokens"):
    """New output tokens of a room, in order."""

    room: RoomId
    token_ids: list[TokenId]
    finish_reason: FinishReason | None = None
    logprobs: list[SampledLogprobs] | None = None
    """One for each of `token_ids`, when the request asked for them."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"{len(self.logprobs)} log-probabilities for {len(self.token_ids)} tokens"
            )


class Admitted(_Message, frozen=True, kw_only=True, tag="admitted"):
    """How much of a prompt was found in the prefix cache."""

    room: RoomId
    cached_tokens: Count


class RoomRefused(_Message, frozen=True, kw_only=True, tag="room_refused"):
    """A request that ends without its tokens, and why."""

    room: RoomId
    kind: RefusalKind
    reason: Reason


class PrefillStats(_Message, frozen=True, kw_only=True, tag="prefill_stats"):
    """Figures of a prefill group. Tokens are logical; lists run over the CP ranks."""

    ticket: Number
    available_tokens: Count
    cached_tokens: Count
    locked_tokens: Count
    free_pages_per_owner: list[Count]
    queued: Count
    running: Count
    prompt_tokens_total: Number
    cached_tokens_total: Number
    evicted_pages_total: Number
    sent_pages_total: list[Number]
    sent_descriptors_total: list[Number]
    sent_bytes_total: list[Number]
    read_bytes_total: list[Number]
    scratch_bytes: list[Bytes]

    def __post_init__(self) -> None:
        ranks = {
            len(column)
            for column in (
                self.sent_pages_total,
                self.sent_descriptors_total,
                self.sent_bytes_total,
                self.read_bytes_total,
                self.scratch_bytes,
            )
        }
        if len(ranks) != 1:
            raise ValueError(f"figures of {sorted(ranks)} ranks; allowed: as many in each list")


class DecodeStats(_Message, frozen=True, kw_only=True, tag="decode_stats"):
    """Figures of a decode worker."""

    ticket: Number
    used_tokens: Count
    waiting: Count
    running: Count
    generated_tokens_total: Number
    failed_transfers_total: Number


class ToldPageMap(_Message, frozen=True, kw_only=True, tag="page_map"):
    """Pages of one pool by owner and range of physical pages; those in neither list are locked.

    `epoch` is the pool's. Range b holds the physical pages b * `pages_per_bin` + 1 and on.
    """

    ticket: Number
    epoch: Epoch
    physical_pages: Annotated[int, Meta(ge=1, le=MAX_PAGE)]
    pages_per_bin: Annotated[int, Meta(ge=1, le=MAX_PAGE)]
    free: list[list[Count]]
    cached: list[list[Count]]

    def bin_sizes(self) -> list[int]:
        """Pages of each range."""
        starts = range(0, self.physical_pages, self.pages_per_bin)
        return [min(self.pages_per_bin, self.physical_pages - start) for start in starts]

    def __post_init__(self) -> None:
        bins = -(-self.physical_pages // self.pages_per_bin)
        if bins > MOST_BINS:
            raise ValueError(f"a page map of {bins} ranges; allowed: at most {MOST_BINS}")
        if len(self.free) != len(self.cached) or not self.free:
            raise ValueError(
                f"free pages of {len(self.free)} owners and cached pages of {len(self.cached)}; "
                "allowed: as many, one or more"
            )
        sizes = self.bin_sizes()
        for row in zip(self.free, self.cached, strict=True):
            if any(len(counts) != bins for counts in row):
                raise ValueError(f"an owner without counts for each of {bins} ranges")
            for size, free, cached in zip(sizes, *row, strict=True):
                if free + cached > size:
                    raise ValueError(f"{free} free and {cached} cached of {size} pages")


class Flushed(_Message, frozen=True, kw_only=True, tag="flushed"):
    """So many logical pages were dropped."""

    ticket: Number
    pages: Count


class Checked(_Message, frozen=True, kw_only=True, tag="checked"):
    """What does not add up in this process's books; `ticket` 0 is unasked."""

    ticket: Number
    problems: list[str]


# Controller -> ranks ---------------------------------------------------------------------------


class Configure(_Message, frozen=True, kw_only=True, tag="configure"):
    """Make a new pool and forget the old one; the start of an epoch. Every rank gets the same."""

    epoch: Epoch
    shared: bool
    physical_pages: Count
    kv_read: KVReader
    scratch_limit_bytes: Bytes
    record: str | None = None
    """Directory for this rank's logits, when the run is recorded."""
    flip_byte_before_batch: Count | None = None
    """Test aid: damage one byte of a prefix page before this batch. A proof must notice."""


class ConnectDecode(_Message, frozen=True, kw_only=True, tag="connect_decode"):
    """Map the pool of a decode worker that the controller has shaken hands with."""

    address: Address
    hello: Hello

    def __post_init__(self) -> None:
        if self.hello.role != "decode" or not self.hello.regions:
            raise ValueError(
                f"{self.hello.role} with {len(self.hello.regions)} regions of memory; "
                "allowed: decode with one or more"
            )


class DisconnectDecode(_Message, frozen=True, kw_only=True, tag="disconnect_decode"):
    """A decode worker's process is gone: its rooms end, and nobody is told."""

    decode_epoch: Epoch
    reason: Reason


# Ranks -> controller ---------------------------------------------------------------------------


class RankReady(_Message, frozen=True, kw_only=True, tag="rank_ready"):
    """The rank has loaded its weights and waits for `Configure`."""

    rank: Rank


class Configured(_Message, frozen=True, kw_only=True, tag="configured"):
    """The rank's pool of this epoch stands."""

    rank: Rank
    epoch: Epoch
    pool_bytes: Bytes


class DecodeConnected(_Message, frozen=True, kw_only=True, tag="decode_connected"):
    """The rank can write to a decode worker's pool, or why it cannot."""

    rank: Rank
    decode_epoch: Epoch
    failure: str | None = None


class RoomToken(_Message, frozen=True, kw_only=True):
    """The first output token of a room."""

    room: RoomId
    token_id: TokenId
    logprobs: SampledLogprobs | None = None


class BatchDone(_Message, frozen=True, kw_only=True, tag="batch_done"):
    """The rank has computed a batch and written its pages."""

    rank: Rank
    batch_id: Count
    tokens: list[RoomToken]
    without_token: list[RoomId] = []
    """Rooms whose last row is here and holds no numbers: each fails alone."""
    scratch_bytes: Bytes
    read_bytes_total: Bytes = 0
    """Of prefixes, copied into scratch since the start of the epoch."""


class RoomConcluded(_Message, frozen=True, kw_only=True, tag="room_concluded"):
    """The rank will touch the room's pages no more."""

    rank: Rank
    room: RoomId
    pages: Count
    descriptors: Count
    bytes: OneRoomBytes
    failure: Reason | None = None


class RankState(_Message, frozen=True, kw_only=True, tag="rank_state"):
    """Sent about once a second: the rooms this rank has open, and what is wrong in its books."""

    rank: Rank
    open_rooms: list[RoomId]
    problem: str | None = None


# Replay tool <-> decode ------------------------------------------------------------------------


class BeginReplay(_Message, frozen=True, kw_only=True, tag="begin_replay"):
    """Drop everything, and do only what is told from now on (engine/replay.py).

    `prefill_epoch` is the life of the group whose pages will come.
    """

    prefill_epoch: Epoch
    record: str


class ReplayReady(_Message, frozen=True, kw_only=True, tag="replay_ready"):
    """Decode is empty and in replay."""


class RoomCovered(_Message, frozen=True, kw_only=True, tag="room_covered"):
    """A replayed room has all its pages at decode."""

    room: RoomId


class StepDone(_Message, frozen=True, kw_only=True, tag="step_done"):
    """Decode has run one replayed batch."""

    batch_id: Count


# Supervisor -> controllers, decode workers and server ------------------------------------------


class ProcessUp(_Message, frozen=True, kw_only=True, tag="process_up"):
    """A life is there, and can be reached at this address."""

    life: LifeName
    address: Address


class ProcessDown(_Message, frozen=True, kw_only=True, tag="process_down"):
    """A life is over: every process of it was reaped, or its host is out of reach."""

    life: LifeName
    reason: Reason
    final: bool = False
    """Its unit does not come back."""

"""What decode, the prefill controller and the CP ranks say to each other about rooms.

Every struct names the life it comes from (`epoch`) and, once both ends have shaken hands, the
life it is meant for (`peer_epoch`): a message from or to an earlier life is refused by whoever
keeps the state (prefill_session.py, decode_session.py). Arrays travel as little-endian int64
bytes whose length and range are checked while decoding.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from cp_shared_kv.errors import ProtocolError
from cp_shared_kv.layout.pages import PhysicalPages, Positions
from cp_shared_kv.transfer.codec import Codec, check_int64, unpack_int64
from cp_shared_kv.transfer.regions import Region
from cp_shared_kv.transfer.reservation import Reservation
from cp_shared_kv.transfer.sampling_params import SampledLogprobs, SamplingParams, TokenId

PROTOCOL_VERSION = 1
"""Raised with every change that an older release could not read or would read wrongly."""

MAX_MESSAGE_BYTES = 16 << 20
"""The largest message is an offer: 1,048,576 tokens, the longest context of the supported
models, are 8 MiB of int64. Twice that leaves room for what surrounds them, and no more."""

MAX_TOKENS = 1 << 20
MAX_PAGE = 1 << 40
"""No pool has as many pages. Keeps page * bytes per page far from the end of int64."""
PAGE_CHECKSUM = "crc32"
"""What the handshake calls `memory.page_checksums`."""
MAX_CHECKSUM = (1 << 32) - 1
MAX_REASON_CHARS = 2000
INT64_MAX = (1 << 63) - 1

Epoch = Annotated[int, Meta(ge=1, le=INT64_MAX)]
"""The life of a prefill group or of a decode worker; unique among all that ever meet."""
RoomId = Annotated[int, Meta(ge=0, le=INT64_MAX)]
Rank = Annotated[int, Meta(ge=0, lt=4096)]
Chunk = Annotated[int, Meta(ge=0, lt=1 << 31)]
Count = Annotated[int, Meta(ge=0, le=MAX_PAGE)]
Bytes = Annotated[int, Meta(ge=0, le=1 << 60)]
Reason = Annotated[str, Meta(min_length=1, max_length=MAX_REASON_CHARS)]
Fingerprint = Annotated[str, Meta(min_length=1, max_length=1000)]


def as_reason(text: str) -> str:
    """`text` as a message may carry it: cut at MAX_REASON_CHARS, and never empty."""
    return text[:MAX_REASON_CHARS] or "no reason given"


class _Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _Message(_Struct, frozen=True, kw_only=True):
    epoch: Epoch
    """The sender's life."""


class _RoomMessage(_Message, frozen=True, kw_only=True):
    peer_epoch: Epoch
    """The life of the receiver that the sender shook hands with."""
    room: RoomId

    def check_address(self, *, room: int, sender: int, receiver: int) -> None:
        """Raise ProtocolError unless it is about `room`, from life `sender` to life `receiver`."""
        if self.room != room:
            raise ProtocolError("message for another room", value=self.room, allowed=str(room))
        if self.epoch != sender:
            raise ProtocolError(
                f"{type(self).__name__} for room {room} comes from another life of the peer",
                value=f"epoch {self.epoch}",
                allowed=f"epoch {sender}",
            )
        if self.peer_epoch != receiver:
            raise ProtocolError(
                f"{type(self).__name__} for room {room} is meant for another life of this process",
                value=f"epoch {self.peer_epoch}",
                allowed=f"epoch {receiver}",
            )


# Both ways, once a pair -------------------------------------------------------------------------


class Hello(_Message, frozen=True, kw_only=True, tag="hello"):
    """Who I am and what my pages look like. rendezvous.py says what must be equal."""

    protocol_version: Annotated[int, Meta(ge=0, le=INT64_MAX)] = PROTOCOL_VERSION
    role: Literal["prefill", "decode"]
    session_id: Annotated[str, Meta(min_length=1, max_length=200)]
    """What `KVTransport.connect` knows this side as."""
    transport: Annotated[str, Meta(min_length=1, max_length=100)]
    cp_size: Annotated[int, Meta(ge=1, le=4096)]
    """Prefill: the CP ranks, each of which concludes each room. Decode: 1."""
    page_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    latent_format: Fingerprint
    index_format: Fingerprint
    num_layers: Annotated[int, Meta(ge=1, le=4096)]
    index_layers: Annotated[tuple[Count, ...], Meta(max_length=4096)]
    bytes_per_page: Bytes
    """Of all layers and kinds together."""
    page_checksum: Fingerprint = "none"
    """What ranks send with each page for decode to compare."""
    model_fingerprint: Fingerprint
    physical_pages: Count
    """Pages of the pool, the padding page not counted (prefill: of each rank's pool)."""
    regions: Annotated[tuple[Region, ...], Meta(max_length=4096)] = ()
    """The memory that the peer may write to; empty where it may write to none."""


# Prefill controller -> decode -------------------------------------------------------------------


class Offer(_RoomMessage, frozen=True, kw_only=True, tag="offer"):
    """A prompt that has come to prefill; Reserve, sooner or later, or Declined answers it."""

    token_ids: bytes
    """int64, the whole prompt: decode matches it with what it already holds."""
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    sampling: SamplingParams = SamplingParams()

    def __post_init__(self) -> None:
        check_int64(
            "token_ids", self.token_ids, at_least=0, at_most=(1 << 31) - 1, max_count=MAX_TOKENS
        )
        if not self.token_ids:
            raise ValueError("token_ids is empty; allowed: 1 token or more")

    def tokens(self) -> npt.NDArray[np.int64]:
        """The prompt, int64[tokens]."""
        return unpack_int64(self.token_ids)


class FirstToken(_RoomMessage, frozen=True, kw_only=True, tag="first_token"):
    """The token that prefill sampled from the prompt's last position."""

    token_id: TokenId
    logprobs: SampledLogprobs | None = None


class Withdrawn(_RoomMessage, frozen=True, kw_only=True, tag="withdrawn"):
    """No CP rank has this room open or will open it; decode may take its pages back at once.

    For an offer that ended before any rank heard of it, and the answer to an AbortRoom that names
    a room prefill does not know.
    """

    reason: Reason


# Decode -> prefill controller -------------------------------------------------------------------


class Reserve(_RoomMessage, frozen=True, kw_only=True, tag="reserve"):
    """Destination pages for an offer: decode holds the prompt's first `first_position` pages."""

    first_position: Count
    physical_pages: bytes

    def __post_init__(self) -> None:
        check_int64("physical_pages", self.physical_pages, at_least=1, at_most=MAX_PAGE)

    def reservation(self, decode_physical_pages: int) -> Reservation:
        """The pages by position, checked against the size of decode's pool (its Hello)."""
        return _reservation(self.first_position, self.physical_pages, decode_physical_pages)


class Declined(_RoomMessage, frozen=True, kw_only=True, tag="declined"):
    """Decode will not take this offer, now or later."""

    reason: Reason


class Released(_RoomMessage, frozen=True, kw_only=True, tag="released"):
    """Decode is done with the room: every page arrived, or none will arrive any more."""


# Prefill controller -> CP ranks -----------------------------------------------------------------


class OpenRoom(_Message, frozen=True, kw_only=True, tag="open_room"):
    """A reserved room that this group will send; precedes the room's first chunk."""

    room: RoomId
    decode_epoch: Epoch
    first_position: Count
    physical_pages: bytes
    total_positions: Count
    """Pages of the whole prompt as prefill counts them."""
    sampling: SamplingParams = SamplingParams()
    """One rank chooses the room's first token. Here and not in the batch that computes it: a
    batch of many rooms has no bound on what such fields would add up to."""
    prompt_token_ids: bytes = b""
    """int64, the prompt's tokens, each once; empty unless the sampling needs them."""

    def __post_init__(self) -> None:
        check_int64(
            "prompt_token_ids",
            self.prompt_token_ids,
            at_least=0,
            at_most=(1 << 31) - 1,
            max_count=MAX_TOKENS,
        )
        check_int64("physical_pages", self.physical_pages, at_least=1, at_most=MAX_PAGE)
        reserved = self.first_position + len(self.physical_pages) // 8
        if reserved != self.total_positions:
            raise ValueError(
                f"the reservation ends at position {reserved}; "
                f"allowed: total_positions = {self.total_positions}"
            )

    def prompt_tokens(self) -> npt.NDArray[np.int64]:
        """The prompt's tokens that the sampling needs, int64."""
        return unpack_int64(self.prompt_token_ids)

    def reservation(self, decode_physical_pages: int) -> Reservation:
        """The pages by position, checked against the size of decode's pool (its Hello)."""
        return _reservation(self.first_position, self.physical_pages, decode_physical_pages)


# CP rank -> decode ------------------------------------------------------------------------------


class Sent(_RoomMessage, frozen=True, kw_only=True, tag="sent"):
    """The pages of these positions, relative to the reservation, have landed."""

    rank: Rank
    chunk: Chunk
    positions: bytes
    descriptors: Count
    """Byte ranges that the pages were merged into."""
    nbytes: Bytes
    checksums: bytes = b""
    """One for each position (int64), or none where the handshake agreed on none."""

    def __post_init__(self) -> None:
        check_int64("positions", self.positions, at_least=0, at_most=MAX_PAGE)
        check_int64("checksums", self.checksums, at_least=0, at_most=MAX_CHECKSUM)
        if self.checksums and len(self.checksums) != len(self.positions):
            raise ValueError(
                f"{len(self.checksums) // 8} checksums for {len(self.positions) // 8} positions"
            )

    def position_array(self) -> Positions:
        """The positions, int64[pages]."""
        return Positions(unpack_int64(self.positions))

    def checksum_array(self) -> npt.NDArray[np.int64] | None:
        """The checksums, int64[pages], or None if there are none."""
        return unpack_int64(self.checksums) if self.checksums else None


class Concluded(_RoomMessage, frozen=True, kw_only=True, tag="concluded"):
    """This rank's last word on a room; every rank says it once, with zero pages too.

    Sent again until acknowledged. The counts let the receiver tell a Sent that is still on its
    way from one that never was.
    """

    rank: Rank
    outcome: Literal["success", "failed"]
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)] = ""
    quiescent: bool
    """True: no write of this rank can land any more. False: a Quiesced follows, later."""
    sent_chunks: Count
    """Sent messages of this rank for the room."""
    total_positions: Count
    """Positions in them."""

    def __post_init__(self) -> None:
        if self.outcome == "success" and (self.reason or not self.quiescent):
            raise ValueError("a success has no reason and is quiescent")
        if self.outcome == "failed" and not self.reason:
            raise ValueError("a failure has a reason")


class Quiesced(_RoomMessage, frozen=True, kw_only=True, tag="quiesced"):
    """Follows Concluded(quiescent=False): now no write of this rank can land any more.

    Sent again until acknowledged.
    """

    rank: Rank


# Decode -> CP rank ------------------------------------------------------------------------------


class Acknowledged(_RoomMessage, frozen=True, kw_only=True, tag="acknowledged"):
    """Decode has heard the rank's Concluded, and all that it counts, or its Quiesced."""

    rank: Rank
    of: Literal["concluded", "quiesced"]


# Either way -------------------------------------------------------------------------------------


class AbortRoom(_RoomMessage, frozen=True, kw_only=True, tag="abort_room"):
    """Stop this room. Its pages stay where they are until every rank has concluded."""

    reason: Reason


Message = (
    Hello
    | Offer
    | FirstToken
    | Withdrawn
    | Reserve
    | Declined
    | Released
    | OpenRoom
    | Sent
    | Concluded
    | Quiesced
    | Acknowledged
    | AbortRoom
)

MESSAGES: Codec[Message] = Codec(Message, MAX_MESSAGE_BYTES)


def encode(message: Message) -> bytes:
    """One message as bytes, at most MAX_MESSAGE_BYTES; ProtocolError above."""
    return MESSAGES.encode(message)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """One message out of untrusted bytes; ProtocolError on anything malformed or out of range."""
    return MESSAGES.decode(data)


def _reservation(first_position: int, data: bytes, decode_physical_pages: int) -> Reservation:
    reservation = Reservation(first_position, PhysicalPages(unpack_int64(data)))
    reservation.check_within(decode_physical_pages)
    return reservation

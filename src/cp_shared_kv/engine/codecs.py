"""Which messages may travel on which link. A process decodes only what it may be told."""

from __future__ import annotations

import msgspec

from cp_shared_kv.engine.batch import Batch
from cp_shared_kv.engine.messages import (
    Admitted,
    BatchDone,
    BeginReplay,
    Cancel,
    Check,
    Checked,
    Configure,
    Configured,
    ConnectDecode,
    DecodeConnected,
    DecodeStats,
    DisconnectDecode,
    Flush,
    Flushed,
    PageMapRequest,
    Paired,
    PrefillStats,
    ProcessDown,
    ProcessUp,
    RankReady,
    RankState,
    Registered,
    ReplayReady,
    RoomConcluded,
    RoomCovered,
    RoomRefused,
    StatsRequest,
    StepDone,
    Submit,
    Tokens,
    ToldPageMap,
)
from cp_shared_kv.engine.satellite_messages import (
    Condemned,
    Dismissed,
    Join,
    Leave,
    Refused,
    RunOver,
    StillHere,
    Terms,
)
from cp_shared_kv.transfer.codec import Codec
from cp_shared_kv.transfer.messages import (
    MAX_MESSAGE_BYTES,
    AbortRoom,
    Acknowledged,
    Concluded,
    Declined,
    FirstToken,
    Hello,
    Offer,
    OpenRoom,
    Quiesced,
    Released,
    Reserve,
    Sent,
    Withdrawn,
)

MAX_SATELLITE_BYTES = 1 << 18
"""The largest are the terms: a config, and the names of at most 64 lives."""

FromServer = Submit | Cancel | StatsRequest | PageMapRequest | Flush | Check
ToServer = (
    Registered
    | Paired
    | Tokens
    | Admitted
    | RoomRefused
    | PrefillStats
    | DecodeStats
    | ToldPageMap
    | Flushed
    | Checked
)
ToRank = Configure | ConnectDecode | DisconnectDecode | OpenRoom | Batch | AbortRoom
FromRank = RankReady | Configured | DecodeConnected | BatchDone | RoomConcluded | RankState
DecodeToRank = Acknowledged | AbortRoom
DecodeToController = (
    Hello | Reserve | Declined | Released | AbortRoom | ReplayReady | RoomCovered | StepDone
)
ControllerToDecode = Hello | Offer | FirstToken | Withdrawn | AbortRoom
RankToDecode = Sent | Concluded | Quiesced
ReplayToDecode = BeginReplay | Reserve | Batch
ToDecode = ControllerToDecode | RankToDecode | ReplayToDecode
FromSupervisor = ProcessUp | ProcessDown
FromSatellite = Join | StillHere | ProcessUp | ProcessDown | Leave
ToSatellite = (
    Terms | Refused | StillHere | ProcessUp | ProcessDown | Condemned | Dismissed | RunOver
)
Recorded = OpenRoom | Batch | Reserve | FirstToken

FROM_SERVER: Codec[FromServer] = Codec(FromServer, MAX_MESSAGE_BYTES)
TO_SERVER: Codec[ToServer] = Codec(ToServer, MAX_MESSAGE_BYTES)
TO_RANK: Codec[ToRank] = Codec(ToRank, MAX_MESSAGE_BYTES)
FROM_RANK: Codec[FromRank] = Codec(FromRank, MAX_MESSAGE_BYTES)
DECODE_TO_RANK: Codec[DecodeToRank] = Codec(DecodeToRank, MAX_MESSAGE_BYTES)
DECODE_TO_CONTROLLER: Codec[DecodeToController] = Codec(DecodeToController, MAX_MESSAGE_BYTES)
FROM_SUPERVISOR: Codec[FromSupervisor] = Codec(FromSupervisor, MAX_MESSAGE_BYTES)
FROM_SATELLITE: Codec[FromSatellite] = Codec(FromSatellite, MAX_SATELLITE_BYTES)
TO_SATELLITE: Codec[ToSatellite] = Codec(ToSatellite, MAX_SATELLITE_BYTES)
TO_DECODE: Codec[ToDecode] = Codec(ToDecode, MAX_MESSAGE_BYTES)
RECORDED: Codec[Recorded] = Codec(Recorded, MAX_MESSAGE_BYTES)

_ANY: Codec[msgspec.Struct] = Codec(
    FromServer
    | ToServer
    | ToRank
    | FromRank
    | DecodeToRank
    | DecodeToController
    | ToDecode
    | FromSupervisor
    | FromSatellite
    | ToSatellite,
    MAX_MESSAGE_BYTES,
)


def encode(message: msgspec.Struct) -> bytes:
    """Any message of the engine as bytes; ProtocolError if it is too large to send."""
    return _ANY.encode(message)

"""The handshake: two ends that differ in anything that matters refuse each other before traffic."""

from __future__ import annotations

from typing import Literal

import msgspec

from cp_shared_kv.errors import HandshakeError, ProtocolError
from cp_shared_kv.transfer.messages import (
    MAX_MESSAGE_BYTES,
    Hello,
    decode,
)

_DECODE_FOLLOWS = "start the decode worker with prefill's"

# What must be equal, in the order in which it is looked at, and what to do where it is not.
# Prefill is the side that fits the group's memory, so decode is the one to follow. Later fields
# can differ only because of earlier ones, or because the processes run different releases.
_EQUAL_FIELDS: dict[str, str] = {
    "transport": f"{_DECODE_FOLLOWS} --disaggregation-transfer-backend",
    "page_size": f"{_DECODE_FOLLOWS} --page-size",
    "model_fingerprint": f"{_DECODE_FOLLOWS} --model-path",
    "num_layers": f"{_DECODE_FOLLOWS} --model-path",
    "index_layers": f"{_DECODE_FOLLOWS} --model-path",
    "latent_format": f"{_DECODE_FOLLOWS} --kv-cache-dtype and --dtype",
    "index_format": f"{_DECODE_FOLLOWS} --kv-cache-dtype and --dtype",
    "page_checksum": f"{_DECODE_FOLLOWS} --verify-kv-transfer",
    "bytes_per_page": "run the same release of cp-shared-kv on both ends",
}


def check_hello(mine: Hello, theirs: Hello) -> None:
    """Raise HandshakeError unless these two ends can transfer pages.

    The message names the field, both values and which side to change; it is the same on both
    sides, since each checks with the other's Hello.
    """
    if mine.role == theirs.role:
        raise HandshakeError(
            f"both ends have the role {mine.role}",
            allowed="one prefill, one decode",
            change="connect a decode worker to a prefill controller",
        )
    _check_version(mine, theirs.protocol_version)
    prefill, decode_side = (mine, theirs) if mine.role == "prefill" else (theirs, mine)
    for field, change in _EQUAL_FIELDS.items():
        ours, other = getattr(prefill, field), getattr(decode_side, field)
        if ours != other:
            raise _differ(field, ours, other, change)
    if decode_side.cp_size != 1:
        raise HandshakeError(
            "decode's cp_size",
            value=decode_side.cp_size,
            allowed="1: a room has N senders and one receiver",
            change="start the decode worker without context parallelism",
        )
    needed_bytes = (decode_side.physical_pages + 1) * decode_side.bytes_per_page
    region_bytes = sum(region.nbytes for region in decode_side.regions)
    if region_bytes < needed_bytes:
        raise HandshakeError(
            f"decode's regions do not hold its {decode_side.physical_pages} pages and padding",
            value=f"{region_bytes} bytes",
            allowed=f"{needed_bytes} bytes or more",
            change="register the whole pool of the decode worker before its Hello",
        )


def read_hello(data: bytes, mine: Hello) -> Hello:
    """The peer's Hello out of untrusted bytes, whatever release it runs; `check_hello` follows.

    HandshakeError for another protocol version, also one whose Hello this release cannot read;
    ProtocolError where the bytes are no Hello.
    """
    if len(data) <= MAX_MESSAGE_BYTES:  # else decode() below refuses it, unread
        _check_version_of(data, mine)
    message = decode(data)
    if not isinstance(message, Hello):
        raise ProtocolError(
            "first message of a peer", value=type(message).__name__, allowed="Hello"
        )
    return message


class _Version(msgspec.Struct):
    """The part of Hello that every release can read."""

    type: Literal["hello"]
    protocol_version: int


def _check_version_of(data: bytes, mine: Hello) -> None:
    try:
        theirs = msgspec.msgpack.decode(data, type=_Version)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # not a Hello of any release: decode() says what is wrong with it
    _check_version(mine, theirs.protocol_version)


def _check_version(mine: Hello, their_version: int) -> None:
    if mine.protocol_version == their_version:
        return
    prefill, decode_side = mine.protocol_version, their_version
    if mine.role == "decode":
        prefill, decode_side = decode_side, prefill
    older = "prefill" if prefill < decode_side else "decode"
    raise _differ("protocol_version", prefill, decode_side, f"upgrade the {older} side")


def _differ(field: str, prefill: object, decode_side: object, change: str) -> HandshakeError:
    return HandshakeError(
        f"prefill and decode differ in {field}",
        value=f"prefill {prefill}, decode {decode_side}",
        allowed="equal",
        change=change,
    )

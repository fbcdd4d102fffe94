"""Tagged structs to bytes and back. What comes in is checked before any of it is used."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import ProtocolError

M = TypeVar("M")


class Codec(Generic[M]):
    """One direction of a link: the messages that may travel on it, and the size of the largest.

    `message_type` is a tagged msgspec Struct or a union of them. `decode` raises ProtocolError
    and nothing else, whatever bytes arrive; a struct's own checks belong in `__post_init__` and
    raise ValueError. Fields hold Python's own types, not NumPy scalars. Keeps no state between
    calls.
    """

    def __init__(self, message_type: Any, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = cast("msgspec.msgpack.Decoder[M]", msgspec.msgpack.Decoder(message_type))

    def encode(self, message: M) -> bytes:
        """`message` as MessagePack. What the peer could not take is refused here, where the reason
        can be seen: ProtocolError for too large a message, or a number beyond 64 bits."""
        try:
            data = self._encoder.encode(message)
        except OverflowError as error:
            raise ProtocolError(f"cannot send {type(message).__name__}: {error}") from error
        self._check_size(len(data), f"cannot send {type(message).__name__}")
        return data

    def decode(self, data: bytes | bytearray | memoryview) -> M:
        """The message in `data`; its size is checked before a byte of it is looked at."""
        self._check_size(memoryview(data).nbytes, "refused a message unread")
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(
                f"refused a message: {error}",
                change="run the same release of cp-shared-kv on both ends",
            ) from error

    def _check_size(self, nbytes: int, what: str) -> None:
        if nbytes > self.max_bytes:
            raise ProtocolError(
                what, value=f"{nbytes} bytes", allowed=f"at most {self.max_bytes} bytes"
            )


def pack_int64(values: npt.NDArray[np.integer[Any]]) -> bytes:
    """A 1-D integer array as it travels: int64, little-endian, no header."""
    return values.astype("<i8", copy=False).tobytes()


def unpack_int64(data: bytes) -> npt.NDArray[np.int64]:
    """The int64 array in `data`, read-only. The length must have been checked."""
    return np.frombuffer(data, dtype="<i8").astype(np.int64, copy=False)


def check_int64(
    name: str, data: bytes, *, at_least: int, at_most: int, max_count: int | None = None
) -> None:
    """Raise ValueError unless `data` is whole int64 values within the two bounds, included.

    For use in `__post_init__` of a received struct: nothing may index with `data` before.
    """
    if len(data) % 8:
        raise ValueError(f"{name} is not whole int64 values: {len(data)} bytes")
    if max_count is not None and len(data) > 8 * max_count:
        raise ValueError(f"{name} holds {len(data) // 8} values; allowed: at most {max_count}")
    values = unpack_int64(data)
    if values.size:
        low, high = int(values.min()), int(values.max())
        if low < at_least or high > at_most:
            raise ValueError(f"{name} runs from {low} to {high}; allowed: {at_least} to {at_most}")

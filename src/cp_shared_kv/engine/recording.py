"""A run on disk: every message in order, every logit as raw bytes. For replays and proofs."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cp_shared_kv.errors import ConfigError, CpkvError

ROW_FIELDS = np.dtype([("batch", "<i8"), ("room", "<i8"), ("position", "<i8")])
"""What a recorded row of logits belongs to."""


def check_recording_place(directory: Path) -> None:
    """Make the directory of a recording. ConfigError where no file can be made in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"--record-batches can write no file there ({error.strerror})",
            value=directory,
            change="name a directory that this user can make, or write to",
        ) from error


class MessageLog:
    """Appends encoded messages to a file, each behind its length."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _written(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")

    def append(self, data: bytes) -> None:
        """Write one message; it is on disk for other processes when this returns.

        CpkvError where that cannot be done: the recording is then of no use.
        """
        with _written(self._path):
            self._file.write(len(data).to_bytes(8, "little"))
            self._file.write(data)
            self._file.flush()


def read_messages(path: Path) -> Iterator[bytes]:
    """The messages of a `MessageLog`, in order. A cut-off last one is an error."""
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        while head := file.read(8):
            length = int.from_bytes(head, "little")
            if len(head) != 8 or length > nbytes - file.tell():
                raise CpkvError("recording ends inside a message", value=str(path))
            yield file.read(length)


class LogitsLog:
    """Appends rows of logits (float32) and what they belong to, in two raw files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _written(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._logits = path.with_suffix(".logits").open("wb")
            self._rows = path.with_suffix(".rows").open("wb")

    def append(
        self,
        batch_id: int,
        rooms: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        logits: npt.NDArray[np.float32],
    ) -> None:
        """One row of `logits` (float32[rows, vocab]) for each room and token position.

        CpkvError where they cannot be written: the recording is then of no use.
        """
        rows = np.empty(len(rooms), ROW_FIELDS)
        rows["batch"], rows["room"], rows["position"] = batch_id, rooms, positions
        with _written(self._path):
            self._rows.write(rows.tobytes())
            self._logits.write(np.ascontiguousarray(logits, "<f4").tobytes())
            self._rows.flush()
            self._logits.flush()


@contextmanager
def _written(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise CpkvError(
            f"--record-batches cannot be written ({error.strerror})",
            value=path,
            change="make room there, or name another directory, and start again",
        ) from error


@dataclass(frozen=True)
class Difference:
    """The first logit in which two recordings differ, as the raw bits of both."""

    source: str
    batch: int
    room: int
    position: int
    token_id: int
    first_bits: int
    second_bits: int

    def __str__(self) -> str:
        first, second = np.array([self.first_bits, self.second_bits], "<u4").view("<f4").tolist()
        return (
            f"{self.source}: batch {self.batch}, token position {self.position}, "
            f"logit {self.token_id}: {first!r} (0x{self.first_bits:08x}) against "
            f"{second!r} (0x{self.second_bits:08x})"
        )


def compare_logits(first: Path, second: Path, source: str) -> tuple[int, Difference | None]:
    """Compare two `LogitsLog`s bit for bit.

    Returns the number of equal rows and the first difference (None if all bits are equal).
    Raises `CpkvError` if they do not hold the same rows, so nothing passes by being absent.
    """
    first_rows, second_rows = _rows(first), _rows(second)
    if not np.array_equal(first_rows, second_rows):
        raise CpkvError(
            f"{source}: the two recordings do not hold the same rows",
            value=f"{len(first_rows)} and {len(second_rows)}",
        )
    if len(first_rows) == 0:
        return 0, None
    first_bits = _bits(first, len(first_rows), source)
    second_bits = _bits(second, len(second_rows), source)
    if first_bits.shape != second_bits.shape:
        raise CpkvError(f"{source}: the two recordings differ in vocabulary size")
    unequal = (first_bits != second_bits).any(axis=1)
    if not unequal.any():
        return len(first_rows), None
    row = int(unequal.argmax())
    column = int((first_bits[row] != second_bits[row]).argmax())
    what = first_rows[row]
    return row, Difference(
        source=source,
        batch=int(what["batch"]),
        room=int(what["room"]),
        position=int(what["position"]),
        token_id=column,
        first_bits=int(first_bits[row, column]),
        second_bits=int(second_bits[row, column]),
    )


def _rows(path: Path) -> npt.NDArray[np.void]:
    return np.fromfile(path.with_suffix(".rows"), ROW_FIELDS)


def _bits(path: Path, rows: int, source: str) -> npt.NDArray[np.uint32]:
    """The logits of so many rows, u32[rows, vocab]."""
    file = path.with_suffix(".logits")
    nbytes = file.stat().st_size
    if nbytes == 0 or nbytes % (4 * rows):
        raise CpkvError(
            f"{source}: a recording of logits is cut off",
            value=f"{nbytes} bytes for {rows} rows in {file}",
        )
    return np.fromfile(file, "<u4").reshape(rows, -1)
